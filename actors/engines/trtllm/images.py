"""The images of a prompt as TensorRT-LLM has them: their places, their positions in two dimensions, their hashes.

TensorRT-LLM takes images with a text and not with token ids: its input processor tokenises the text, and writes the
placeholders of each image out. But a text from token ids may have other tokens. So the input processor is given the
*outline* of a prompt, in which a special token stands for each token of text: what it makes of images depends on their
places alone. The outline's tokens are then replaced by the prompt's own.

With embeddings its input processor knows no shape of an image, and takes the nearest to a square. So the positions are
computed here, from the grid of each item, and passed on beside the embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

from attrs import frozen

from actors.engines.media_check import item_places
from actors.engines.trtllm.signatures import EMBEDDED_FAMILIES
from protocol.errors import EngineRefused, Unsupported
from protocol.messages.generation import Generate
from protocol.messages.media import MediaForm, MediaInfo, MediaItem
from protocol.tensors import FLOATS, Dtype

CONFIG = "config.json"
AUTO = "auto"
"""TensorRT-LLM's word for the type of the model's own weights."""

_WORD_DIGITS, _WORD_VALUES = 8, 2**32
_SALT = "images:"

PlacedImages: TypeAlias = Sequence[tuple[MediaItem, range]]
"""The images of a prompt and their places in it, in the order of the places."""


def media_info(
    files: Mapping[str, bytes], image_token: int, merge: int, form: MediaForm, dtype: str = AUTO
) -> MediaInfo:
    """Return the images of an engine's requests, by the files of its model's folder; `dtype` is a setting of it.

    Raises `Unsupported` for a model without embeddings of images in TensorRT-LLM, or with unknown numbers.
    """
    config = json.loads(files[CONFIG])
    text = config.get("text_config") or config
    if form is MediaForm.EMBEDDINGS and config.get("model_type") not in EMBEDDED_FAMILIES:
        families = ", ".join(sorted(EMBEDDED_FAMILIES))
        raise Unsupported(f"TensorRT-LLM takes embeddings for {families}, and this is {config.get('model_type')}")
    if not isinstance(text.get("hidden_size"), int):
        raise Unsupported("the model's configuration has no hidden_size")
    return MediaInfo(
        form=form,
        width=text["hidden_size"],
        dtype=_dtype(_own_dtype(config, text) if dtype == AUTO else dtype),
        merge=merge,
        image_token=image_token,
        start_token=Outline.of(files).start,
    )


def placed_images(request: Generate, media: MediaInfo) -> PlacedImages:
    """Return the images of a request with their places; raises `BadRequest` if its parts contradict each other."""
    return sorted(zip(request.media, item_places(request, media), strict=True), key=lambda pair: pair[1].start)


@frozen
class Outline:
    """The special tokens of an outline: `text` for a token of text, `start` before each image."""

    text: int
    start: int

    @classmethod
    def of(cls, files: Mapping[str, bytes]) -> Outline:
        """Return those of a model, by the files of its folder; raises `Unsupported` for a model without them."""
        config = json.loads(files[CONFIG])
        text, start = config.get("vision_end_token_id"), config.get("vision_start_token_id")
        if not isinstance(text, int) or not isinstance(start, int):
            raise Unsupported("the model's configuration has no vision_start_token_id, or no vision_end_token_id")
        return cls(text, start)

    def written(self, count: int, placed: PlacedImages, image: int) -> list[int]:
        """Return the outline of a prompt of `count` tokens, with one placeholder for each image."""
        written, begin = list[int](), 0
        for _, place in placed:
            written += [*[self.text] * (place.start - begin - 1), self.start, image]
            begin = place.stop
        return [*written, *[self.text] * (count - begin)]

    def filled(self, own: Sequence[int], made: Sequence[int], placed: PlacedImages) -> list[int]:
        """Return a prompt's own tokens, and in its images the tokens that TensorRT-LLM has made of the outline.

        Raises `EngineRefused` if it has made another outline.
        """
        images = {token for _, place in placed for token in place}
        texts = [token for place, token in enumerate(made) if place not in images]
        if len(made) != len(own) or not {*texts} <= {self.text, self.start}:
            raise EngineRefused(f"TensorRT-LLM makes {len(made)} tokens of a prompt with images that has {len(own)}")
        return [made[place] if place in images else token for place, token in enumerate(own)]


@frozen
class Positions:
    """The positions of a prompt's tokens in time, height and width, and by how much the next token's differs."""

    axes: tuple[list[int], list[int], list[int]]
    delta: int


def positions(count: int, placed: PlacedImages, merge: int) -> Positions:
    """Return the positions of `count` tokens: a text's follow each other, an image's are those of its grid."""
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    begin = following = 0
    for item, place in placed:
        _, height, width = (side // merge for side in item.grid)
        first = following + place.start - begin
        for axis in axes:
            axis.extend(range(following, first))
        axes[0].extend([first] * item.tokens)
        axes[1].extend(first + row for row in range(height) for _ in range(width))
        axes[2].extend([*range(first, first + width)] * height)
        begin, following = place.stop, first + max(height, width)
    for axis in axes:
        axis.extend(range(following, following + count - begin))
    return Positions(axes, following - begin)


def hash_words(digest: str) -> list[int]:
    """Return a digest as TensorRT-LLM has the hash of an image: eight signed integers of 32 bits."""
    words = (int(digest[place : place + _WORD_DIGITS], 16) for place in range(0, len(digest), _WORD_DIGITS))
    return [word - _WORD_VALUES if word >= _WORD_VALUES // 2 else word for word in words]


def image_salt(placed: PlacedImages, own: str | None) -> str:
    """Return the cache salt of a request with images and a salt of its `own`: no other images have it."""
    parts = [*(item.digest for item, _ in placed), "" if own is None else f"/{own}"]
    return _SALT + sha256("\0".join(parts).encode()).hexdigest()


def _own_dtype(*configs: Mapping[str, object]) -> object:
    """Return the type of a model's weights by its configuration, whose older versions have another key."""
    return next((config[key] for config in configs for key in ("dtype", "torch_dtype") if config.get(key)), None)


def _dtype(name: object) -> Dtype:
    """Return the type of embeddings by its name; raises `Unsupported` for another one."""
    found = next((dtype for dtype in FLOATS if dtype.value == name), None)
    if found is None:
        raise Unsupported(f"embeddings of the type {name} are not known")
    return found
