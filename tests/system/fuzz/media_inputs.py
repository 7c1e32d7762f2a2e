"""Damaged images, videos and embeddings: real files of each type, changed where their formats are read from."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from attrs import frozen

from protocol.messages.media import Modality
from tests.rig import media_samples as samples

Change: TypeAlias = Callable[[bytearray, Random], None]

IMAGES: dict[str, Callable[[], bytes]] = {
    "png": samples.png,
    "palette": lambda: samples.saved(samples.picture().quantize(16), "PNG"),
    "alpha": lambda: samples.saved(samples.picture(mode="RGBA"), "PNG"),
    "jpeg": samples.jpeg,
    "turned": lambda: samples.jpeg(orientation=6),
    "progressive": lambda: samples.saved(samples.picture(), "JPEG", progressive=True),
    "cmyk": lambda: samples.saved(samples.picture(mode="CMYK"), "JPEG"),
    "webp": samples.webp,
    "lossy": lambda: samples.saved(samples.picture(), "WEBP", quality=50),
    "gif": samples.gif,
    "animated": lambda: samples.animated("GIF"),
    "animated webp": lambda: samples.animated("WEBP"),
    "bomb": lambda: samples.png_bomb(30_000, 30_000),
    "embeddings": samples.embeddings,
}
VIDEOS: dict[str, Callable[[], bytes]] = {
    "mp4": samples.video,
    "turned mp4": samples.turned_video,
    "webm": lambda: samples.video("webm"),
    "matroska": lambda: samples.video("matroska"),
    "avi": lambda: samples.video("avi"),
    "sound": samples.sound,
}
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HEAD_BYTES = 64


@frozen
class Input:
    """One damaged content, by what it was made from and how."""

    modality: Modality
    content: bytes
    about: str


def make(number: int, seed: int) -> Input:
    """Return the input of a number: always the same one for a seed."""
    random = Random(f"{seed} {number}")
    modality = Modality.VIDEO if random.random() < 0.3 else Modality.IMAGE
    files = VIDEOS if modality is Modality.VIDEO else IMAGES
    name = random.choice(sorted(files))
    content = bytearray(files[name]())
    changes = [random.choice(CHANGES) for _ in range(random.choice((1, 1, 1, 2, 3, 8)))]
    for change in changes:
        if content:
            change(content, random)
    if name in {"png", "palette", "alpha"} and random.random() < 0.7:
        _mend_png(content)
    if random.random() < 0.02:
        modality = Modality.IMAGE if modality is Modality.VIDEO else Modality.VIDEO
    words = " ".join(change.__name__.strip("_") for change in changes)
    return Input(modality, bytes(content), f"{name}: {words}")


def _place(content: bytearray, random: Random) -> int:
    """Return a place, in the head of the file as often as in the rest: there stands what is parsed."""
    return random.randrange(min(HEAD_BYTES, len(content)) if random.random() < 0.5 else len(content))


def _flip(content: bytearray, random: Random) -> None:
    content[_place(content, random)] ^= 1 << random.randrange(8)


def _byte(content: bytearray, random: Random) -> None:
    content[_place(content, random)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _number(content: bytearray, random: Random) -> None:
    """Replace a number by one at the edge of its type, in either order of bytes."""
    size = random.choice((2, 4))
    place = _place(content, random)
    number = random.choice(NUMBERS) & ((1 << 8 * size) - 1)
    data = number.to_bytes(size, random.choice(("little", "big")))
    content[place : place + size] = data[: len(content) - place]


def _noise(content: bytearray, random: Random) -> None:
    place, size = _place(content, random), random.randrange(1, 64)
    content[place : place + size] = random.randbytes(min(size, len(content) - place))


def _cut(content: bytearray, random: Random) -> None:
    del content[random.randrange(len(content)) :]


def _remove(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    del content[place : place + random.randrange(1, 200)]


def _repeat(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    piece = content[place : place + random.randrange(1, 500)]
    content[place:place] = piece * random.choice((1, 2, 20))


def _insert(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    content[place:place] = random.randbytes(random.randrange(1, 64))


def _splice(content: bytearray, random: Random) -> None:
    """Continue with the end of another file."""
    files = {**IMAGES, **VIDEOS}
    other = files[random.choice(sorted(files))]()
    content[_place(content, random) :] = other[random.randrange(len(other)) :]


def _zeros(content: bytearray, random: Random) -> None:
    place = _place(content, random)
    size = min(random.choice((4, 16, 256)), len(content) - place)
    content[place : place + size] = bytes(size)


CHANGES: tuple[Change, ...] = (_flip, _byte, _number, _number, _noise, _cut, _remove, _repeat, _insert, _splice, _zeros)


def _mend_png(content: bytearray) -> None:
    """Make the checksums of a PNG right again, so that what was changed is read."""
    place = 8
    while place + 12 <= len(content):
        (size,) = struct.unpack_from(">I", content, place)
        end = place + 8 + size
        if end + 4 > len(content):
            return
        struct.pack_into(">I", content, end, zlib.crc32(content[place + 4 : end]))
        place = end + 4
