"""Pictures that benches send: made by Pillow, each with bytes of its own, and the requests that ask about them."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any

import av
from PIL import Image, ImageDraw

from bench.rig.clients import chat_body

QUESTION = "What is in this picture?"
SOI, COMMENT = b"\xff\xd8", b"\xff\xfe"  # markers of JPEG: the start of an image, a comment
COMMENT_BYTES_MIN, COMMENT_BYTES_MAX = 4, 60_000
QUALITIES = (98, 95, 92, 88, 80, 70, 60, 50, 40, 30, 20)


def jpeg(width: int, height: int, seed: int, *, quality: int = 75, shapes: int = 24) -> bytes:
    """Return a picture of coloured shapes, which a seed places."""
    return encoded(_shapes(width, height, seed, shapes), "JPEG", quality=quality)


def png(width: int, height: int, seed: int, *, shapes: int = 24) -> bytes:
    """Return the same picture as PNG, whose pixels are exact."""
    return encoded(_shapes(width, height, seed, shapes), "PNG", compress_level=1)


def noise_jpeg(width: int, height: int, size_bytes: int, seed: int) -> bytes:
    """Return a picture of about so many bytes, as of a photograph: smooth noise, and a comment for what is missing."""
    small = Image.frombytes("RGB", (width // 4, height // 4), Random(seed).randbytes(width // 4 * (height // 4) * 3))
    picture = small.resize((width, height), Image.Resampling.BILINEAR)
    sizes = (encoded(picture, "JPEG", quality=quality) for quality in QUALITIES)
    best = next(each for each in sizes if len(each) <= size_bytes - COMMENT_BYTES_MIN)
    while (missing := size_bytes - len(best)) >= COMMENT_BYTES_MIN:
        best = commented(best, b" " * (min(missing, COMMENT_BYTES_MAX) - COMMENT_BYTES_MIN))
    return best


def commented(picture: bytes, comment: bytes) -> bytes:
    """Return a JPEG with a comment, so that its bytes are others and its pixels the same."""
    assert picture.startswith(SOI)
    return SOI + COMMENT + (len(comment) + 2).to_bytes(2, "big") + comment + picture[len(SOI) :]


def data_url(picture: bytes, kind: str = "jpeg") -> str:
    """Return a picture as a data URL."""
    return f"data:image/{kind};base64,{b64encode(picture).decode()}"


def file_url(folder: Path, name: str, picture: bytes) -> str:
    """Write a picture into a folder, and return its URL."""
    (folder / name).write_bytes(picture)
    return (folder / name).as_uri()


def picture_body(*urls: str, tokens_max: int | None = None, text: str = QUESTION, **options: Any) -> dict[str, Any]:
    """Return a chat request about pictures, in their order before the text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": text}]
    return chat_body(text, tokens_max, **options) | {"messages": [{"role": "user", "content": content}]}


def video_body(url: str, tokens_max: int | None = None, text: str = QUESTION, **options: Any) -> dict[str, Any]:
    """Return a chat request about a video."""
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": text}]
    return chat_body(text, tokens_max, **options) | {"messages": [{"role": "user", "content": content}]}


def video(width: int, height: int, frames: int) -> bytes:
    """Return a video of coloured shapes, 25 frames a second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        pictures = [av.VideoFrame.from_image(_shapes(width, height, seed, 24)) for seed in range(8)]  # type: ignore[no-untyped-call]
        for number in range(frames):
            container.mux(stream.encode(pictures[number % len(pictures)]))
        container.mux(stream.encode())
    return buffer.getvalue()


def _shapes(width: int, height: int, seed: int, shapes: int) -> Image.Image:
    chance = Random(seed)
    picture = Image.new("RGB", (width, height), _colour(chance))
    draw = ImageDraw.Draw(picture)
    for _ in range(shapes):
        x, y = chance.randrange(width), chance.randrange(height)
        box = (x, y, x + chance.randint(1, max(1, width // 4)), y + chance.randint(1, max(1, height // 4)))
        (draw.rectangle if chance.random() < 0.5 else draw.ellipse)(box, fill=_colour(chance))
    return picture


def _colour(chance: Random) -> tuple[int, int, int]:
    return chance.randrange(256), chance.randrange(256), chance.randrange(256)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    """Return a picture as a file of a kind."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()
