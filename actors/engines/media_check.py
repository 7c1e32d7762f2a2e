"""The checks of images and videos before submission, for engines of every kind.

With more or fewer embeddings than placeholders an engine crashes, hangs, or answers about another picture. So each
number that two parts of a request state is compared here, before submission; the error has both.
"""

from __future__ import annotations

from math import inf

from protocol.errors import BadRequest, Unsupported
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate
from protocol.messages.media import (
    CHANNELS,
    DIGEST_DIGITS,
    DIGEST_LENGTH,
    MediaForm,
    MediaInfo,
    MediaItem,
    Modality,
    expected_shape,
    grid_tokens,
)
from protocol.tensors import NO_TENSOR, Dtype, size_bytes
from protocol.token_ids import TokenIds


def check_media(request: Generate, info: EngineInfo) -> None:
    """Raise `BadRequest` unless the placeholders of a prompt and its items agree, and the engine takes such items."""
    media = info.media
    if media is None:
        if request.media:
            raise Unsupported("this engine takes neither images nor videos")
        return
    for number, item in enumerate(request.media, start=1):
        if media.placeholder(item.modality) is None:
            raise Unsupported(f"this engine takes no {item.modality}")
        if item.form is not info.media_form:
            raise BadRequest(
                f"{item.modality} {number} is given as {item.form}, and the engine takes {info.media_form}"
            )
        check_item(item, media)
    item_places(request, media)


def item_places(request: Generate, media: MediaInfo) -> tuple[range, ...]:
    """Return the places of the placeholders of each item in a prompt, in the order of the items.

    Raises `BadRequest` unless there are as many as the items have tokens, one run for each item behind the token that
    begins an item. Such tokens in the answer before a resume are text.
    """
    resumed = request.resumed_tokens
    tokens = request.tokens[: len(request.tokens) - resumed] if resumed else request.tokens
    places = [range(0)] * len(request.media)
    for modality in Modality:
        placeholder = media.placeholder(modality)
        if placeholder is not None:
            items = [(index, item) for index, item in enumerate(request.media) if item.modality is modality]
            count, needed = tokens.count(placeholder), sum(item.tokens for _, item in items)
            if count != needed:
                raise BadRequest(
                    f"the prompt has {count} placeholders ({placeholder}) of {modality}s, where its {len(items)}"
                    f" {modality}s have {needed} tokens"
                )
            begin = 0
            for number, (index, item) in enumerate(items, start=1):
                places[index] = _places(tokens, item, placeholder, begin, f"{modality} {number}", media)
                begin = places[index].stop
    return tuple(places)


def _places(tokens: TokenIds, item: MediaItem, placeholder: int, begin: int, name: str, media: MediaInfo) -> range:
    """Return the places of one item, from `begin` on; the prompt has placeholders enough."""
    first = tokens.index(placeholder, begin)
    last, start = first + item.tokens, media.start_token
    is_whole = tokens[first:last].count(placeholder) == item.tokens
    if not is_whole or (start is not None and tokens[last : last + 1].tolist() == [placeholder]):
        found = next((index for index in range(first, len(tokens)) if tokens[index] != placeholder), len(tokens))
        raise BadRequest(f"{name} has {item.tokens} tokens, and {found - first} of its placeholders stand together")
    if start is not None and tokens[first - 1 : first].tolist() != [start]:
        raise BadRequest(f"the placeholders of {name} do not stand behind {start}, the token that begins one")
    return range(first, last)


def check_pixels(item: MediaItem, media: MediaInfo) -> None:
    """Raise `BadRequest` for an item that no encoder can encode, or with a wrong number of `tokens`."""
    if media.placeholder(item.modality) is None:
        raise Unsupported(f"this engine takes no {item.modality}")
    if item.form is not MediaForm.PIXELS:
        raise BadRequest(f"an encoder takes pixels, not {item.form}")
    check_item(item, media)


def check_item(item: MediaItem, media: MediaInfo) -> None:
    """Raise `BadRequest` for an item that contradicts itself or the engine's media."""
    if len(item.digest) != DIGEST_LENGTH or not set(item.digest) <= DIGEST_DIGITS:
        raise BadRequest(f"the digest of an item has {DIGEST_LENGTH} hexadecimal digits")
    tokens = grid_tokens(item.grid, media.merge)
    if item.tokens < 1 or tokens != item.tokens:
        raise BadRequest(
            f"an item says that it has {item.tokens} tokens, and its grid of {_sizes(item.grid)} patches makes {tokens}"
        )
    if item.seconds_per_grid is not None and not 0 < item.seconds_per_grid < inf:
        raise BadRequest(f"a step of a video's grid cannot last {item.seconds_per_grid} s")
    _check_tensor(item, media)


def _check_tensor(item: MediaItem, media: MediaInfo) -> None:
    """Raise `BadRequest` unless the tensor of an item has the dtype, the shape and the bytes of its form."""
    tensor, shape = item.data, expected_shape(item, media)
    dtype = media.dtype if item.form is MediaForm.EMBEDDINGS else Dtype.UINT8
    if tensor.dtype is not dtype:
        raise BadRequest(f"the {item.form} of an item are {tensor.dtype}, where {dtype} are needed")
    if item.form is MediaForm.PIXELS:
        if len(tensor.shape) != 4 or min(tensor.shape) < 1 or tensor.shape[3] != CHANNELS:
            raise BadRequest(f"pixels are [frames, height, width, {CHANNELS}], not [{_sizes(tensor.shape)}]")
    elif tensor.shape != shape:
        raise BadRequest(
            f"the {item.form} of an item of {item.tokens} tokens are [{_sizes(tensor.shape)}], where"
            f" [{_sizes(shape or NO_TENSOR.shape)}] are needed"
        )
    if len(tensor.data) != size_bytes(tensor):
        raise BadRequest(f"a tensor of {size_bytes(tensor)} bytes comes with {len(tensor.data)}")


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
