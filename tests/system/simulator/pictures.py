"""Images and videos of the simulator, in a tiny format, and the embeddings that a model has of them.

A picture is one line of text: its name, its size, and what is wrong with it. A data URL holds that line, and the URL of a
host has it as its path. So the client that draws a picture, the simulated decoder, and the model of the right answer
each know its pixels from its URL alone.
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256, shake_256
from typing import TypeAlias
from zlib import crc32

from attrs import define, evolve, frozen

from actors.media.layout import PixelLimits, VisionLayout
from protocol.messages.media import Detail, MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor
from tests.rig.vision import IMAGE, SEEING, VIDEO, WIDTH

HEAD = "data:image/x-simulated;base64,"
HOST = "https://pictures.example/"
LAYOUT = VisionLayout(1, 2, 2, PixelLimits(16, 1600), PixelLimits(16, 32), IMAGE, VIDEO)
SIGHTED = evolve(SEEING, vision=LAYOUT)
FPS = 2.0
ELEMENT_BYTES = 4
TROUBLES: dict[str, frozenset[str]] = {  # what may be wrong with a picture, and the errors of which one must follow
    "": frozenset(),
    "slow": frozenset(),
    "hangs": frozenset({"deadline_exceeded"}),  # its host sends nothing, or its decoder computes for ever
    "gone": frozenset({"invalid_request"}),
    "torn": frozenset({"invalid_request"}),  # its decoder cannot read it
    "crashes": frozenset({"invalid_request"}),  # its decoder
    "lies": frozenset({"invalid_request"}),  # its decoder makes another size of it than it said
    "grows": frozenset({"too_large"}),  # its host sends more than it may
    "ftp": frozenset({"invalid_request"}),  # its URL is of no scheme that is allowed
}
SCHEME = "ftp://pictures.example/"
OTHER = "other-"
LARGE = "map"  # a picture that several clients send, with more tokens than one of low detail has
SHARED = ("sun", "sea", "elm", "other-sun", "other-sea", "other-elm")  # small ones


@frozen
class Picture:
    """An image, or a video if it has frames; height and width are in pixels."""

    name: str
    height: int
    width: int
    frames: int = 0
    trouble: str = ""
    remote: bool = False  # on a host; else in its URL
    detail: Detail = Detail.AUTO

    @property
    def modality(self) -> Modality:
        return Modality.VIDEO if self.frames else Modality.IMAGE

    @property
    def line(self) -> str:
        """Its content."""
        parts = self.name, f"{self.height}x{self.width}x{self.frames}", self.trouble
        return "/".join(part for part in parts if part)

    @property
    def url(self) -> str:
        if self.trouble == "ftp":
            return SCHEME + self.line
        return HOST + self.line if self.remote else HEAD + b64encode(self.line.encode()).decode()

    @property
    def item(self) -> MediaItem:
        """What engines must get of it, but for its digest."""
        return _item(self)


Content: TypeAlias = str | tuple[str | Picture, ...]
"""What a message says: a text, or texts and pictures."""


def text_of(content: Content) -> str:
    """Return the texts of a message, joined."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def with_others(content: Content) -> Content:
    """Return a message with other pictures of the same sizes; the large one is the same, of another detail."""
    return content if isinstance(content, str) else tuple(map(_other, content))


def _other(part: str | Picture) -> str | Picture:
    if isinstance(part, str):
        return part
    if part.name == LARGE:
        return evolve(part, detail=Detail.HIGH if part.detail is Detail.LOW else Detail.LOW)
    is_other = part.name.startswith(OTHER)  # so that what is shared stays shared
    return evolve(part, name=part.name.removeprefix(OTHER) if is_other else OTHER + part.name)


def pictures_of(content: Content) -> tuple[Picture, ...]:
    """Return the pictures of a message."""
    return () if isinstance(content, str) else tuple(part for part in content if isinstance(part, Picture))


def read(url: str) -> Picture:
    """Return the picture of a URL."""
    remote = url.startswith(HOST)
    line = url.removeprefix(HOST) if remote else b64decode(url.removeprefix(HEAD)).decode()
    name, size, *trouble = line.split("/")
    height, width, frames = map(int, size.split("x"))
    return Picture(name, height, width, frames, "".join(trouble), remote)


@cache
def _item(picture: Picture) -> MediaItem:
    seconds: float | None = None
    if picture.frames:
        sampling = LAYOUT.sample(picture.frames, FPS)
        fit, frames = LAYOUT.fit_video(len(sampling.frames), picture.height, picture.width), sampling.frames
        seconds = sampling.interval_s * LAYOUT.temporal_patch
    else:
        fit, frames = LAYOUT.fit_image(picture.height, picture.width, picture.detail), (0,)
    data = pixels(picture.line, frames, *fit.decoded)
    return MediaItem(picture.modality, "", fit.grid, fit.tokens, MediaForm.PIXELS, data, seconds)


def pixels(line: str, frames: Sequence[int], height: int, width: int) -> Tensor:
    """Return some frames of a picture, resized."""
    size = height * width * 3
    data = b"".join(shake_256(f"{line} {frame} {height} {width}".encode()).digest(size) for frame in frames)
    return Tensor(Dtype.UINT8, (len(frames), height, width, 3), memoryview(data))


# What a model sees -------------------------------------------------------------------------


def seen(tokens: Sequence[int], items: Sequence[MediaItem]) -> list[int]:
    """Return a prompt's token ids, in which numbers of what an engine was given of each item stand for placeholders.

    An answer is a function of these, so it is about the pixels or the embeddings that the engine has, whatever digest
    came with them.
    """
    shown = {
        placeholder: iter([row for item in items if item.modality is modality for row in rows(item)])
        for modality, placeholder in ((Modality.IMAGE, IMAGE), (Modality.VIDEO, VIDEO))
    }
    prompt = [next(shown[token]) if token in shown else token for token in tokens]
    assert not any(list(left) for left in shown.values()), "an item has no place"
    return prompt


def rows(item: MediaItem) -> list[int]:
    """Return a number for each row of the embeddings of an item, and for its position."""
    data = _embeddings(item) if item.form is MediaForm.PIXELS else bytes(item.data.data)
    assert len(data) == item.tokens * WIDTH * ELEMENT_BYTES, "an item has other embeddings than tokens"
    position = repr((item.modality.value, item.grid, item.seconds_per_grid)).encode()
    size = WIDTH * ELEMENT_BYTES
    return [-1 - crc32(data[row * size : (row + 1) * size], crc32(position)) for row in range(item.tokens)]


def _embeddings(item: MediaItem) -> bytes:
    """Return what the simulated encoder makes of an item (`actors.engines.simulated.encoder.embed`)."""
    key = sha256(repr((item.modality.value, item.grid)).encode() + bytes(item.data.data)).digest()
    data = bytearray()
    for row in range(item.tokens):
        drawn = bytearray(shake_256(key + row.to_bytes(8)).digest(WIDTH * ELEMENT_BYTES))
        drawn[ELEMENT_BYTES - 1 :: ELEMENT_BYTES] = bytes(
            byte & 0x80 | 0x3F for byte in drawn[ELEMENT_BYTES - 1 :: ELEMENT_BYTES]
        )
        data += drawn
    return bytes(data)


# Drawing -----------------------------------------------------------------------------------


@define(eq=False)
class Album:
    """Draws the pictures of one run's requests."""

    rng: random.Random
    share: float  # of the requests that have some
    items_max: int  # of a request, beyond which it is refused
    sighted: bool = True  # else the model takes none
    troubled: bool = True  # some pictures have troubles

    def content(self, name: str, text: str, before: int) -> tuple[Content, frozenset[str]]:
        """Draw a message with a text and maybe pictures, and the errors of which one must answer it, if any must.

        `before` is the number of pictures of earlier messages.
        """
        rng = self.rng
        if rng.random() >= self.share:
            return text, frozenset()
        many = rng.choice((1, 1, 2, 3))
        pictures = [self.picture(f"{name}-{number}") for number in range(many)]
        content = self._between(text.split(" "), pictures)
        troubles = [TROUBLES[picture.trouble] for picture in pictures]
        if not self.sighted:
            return content, frozenset({"unsupported_parameter", *self._early(pictures)})
        if before + many > self.items_max:
            return content, frozenset({"invalid_request"})
        return content, frozenset().union(*troubles)

    def picture(self, name: str) -> Picture:
        """Draw a picture of a name, or one that others send, too."""
        rng = self.rng
        trouble = rng.choice((*TROUBLES, "slow")) if self.troubled and rng.random() < 0.12 else ""
        if not trouble and rng.random() < 0.4:
            if rng.random() < 0.3:
                return Picture(LARGE, 34, 33, detail=rng.choice((Detail.LOW, Detail.HIGH)))
            return Picture(rng.choice(SHARED), 4, 6, remote=rng.random() < 0.2)
        frames = rng.choice((0, 0, 0, 2, 5))
        height, width = rng.randint(3, 8), rng.randint(3, 8)
        detail = rng.choice((Detail.AUTO, Detail.AUTO, Detail.LOW, Detail.HIGH)) if not frames else Detail.AUTO
        return Picture(name, height, width, frames, trouble, rng.random() < 0.4 or trouble == "grows", detail)

    def _early(self, pictures: Sequence[Picture]) -> frozenset[str]:
        """Return the errors that are found before the model is asked."""
        return frozenset({"invalid_request"}) if any(picture.trouble == "ftp" for picture in pictures) else frozenset()

    def _between(self, words: Sequence[str], pictures: Sequence[Picture]) -> Content:
        """Put pictures between the words of a text, or before or behind it."""
        places = sorted(self.rng.randint(0, len(words)) for _ in pictures)
        parts: list[str | Picture] = []
        begin = 0
        for place, picture in zip(places, pictures, strict=True):
            if text := " ".join(words[begin:place]):
                parts.append(text)
            parts.append(picture)
            begin = place
        if text := " ".join(words[begin:]):
            parts.append(text)
        return tuple(parts)
