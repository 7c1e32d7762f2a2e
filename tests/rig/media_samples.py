"""Real images, videos and embeddings for tests, made when they are first asked for."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import av
from PIL import Image

from protocol.messages.media import Media, Modality

WIDTH, HEIGHT = 64, 48


def picture(width: int = WIDTH, height: int = HEIGHT, mode: str = "RGB") -> Image.Image:
    """Return an image of which every corner has a colour of its own."""
    image = Image.new("RGB", (width, height), (10, 20, 30))
    for place, colour in (((0, 0), "red"), ((1, 0), "lime"), ((0, 1), "blue"), ((1, 1), "yellow")):
        image.paste(colour, (place[0] * width // 2, place[1] * height // 2, *_middle(place, width, height)))
    return image if mode == "RGB" else image.convert(mode)


def _middle(place: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    return (place[0] + 1) * width // 2, (place[1] + 1) * height // 2


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return an image as a file of a kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def png(width: int = WIDTH, height: int = HEIGHT) -> bytes:
    return saved(picture(width, height), "PNG")


@cache
def jpeg(width: int = WIDTH, height: int = HEIGHT, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture(width, height), "JPEG", quality=95, exif=exif)


@cache
def webp() -> bytes:
    return saved(picture(), "WEBP", lossless=True)


@cache
def gif() -> bytes:
    return saved(picture(), "GIF")


@cache
def noise(width: int, height: int) -> bytes:
    """Return a JPEG that cannot be compressed well: about a byte a pixel."""
    return saved(Image.effect_noise((width, height), 90).convert("RGB"), "JPEG", quality=95)


def animated(kind: str) -> bytes:
    """Return an animation of two frames."""
    return saved(picture(), kind, save_all=True, append_images=[picture().rotate(180)])


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG of about a kilobyte whose header states a size, and whose data do not fill it."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(500_000))),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


CODECS = {"mp4": "libx264", "webm": "libvpx-vp9", "matroska": "libx264", "avi": "mpeg4"}


@cache
def video(container: str = "mp4", frames: int = 12, fps: int = 4, width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Return a video whose frames become brighter from one to the next."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(CODECS[container], rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            shade = 255 * number // max(1, frames - 1)
            frame: Any = av.VideoFrame(width, height, "rgb24")
            frame.planes[0].update(bytes([shade]) * frame.planes[0].buffer_size)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


IDENTITY = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
CLOCKWISE = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000)


@cache
def turned_video() -> bytes:
    """Return a video that is to be shown turned clockwise by 90 degrees, as telephones record them."""
    content = video()
    place = content.find(IDENTITY, content.find(IDENTITY) + 1)  # behind that of the whole file, that of the track
    return content[:place] + CLOCKWISE + content[place + len(IDENTITY) :]


@cache
def sound() -> bytes:
    """Return an MP4 file that has a sound track alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("aac", rate=16_000)
        stream.layout = "mono"
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.rate = 16_000
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], **more: Any) -> bytes:
    """Return a safetensors file of tensors, each by its type, its shape and its bytes."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(data)],
            **more,
        }
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def embeddings(tokens: int = 4, width: int = 8, grid: Sequence[int] = (1, 4, 4), dtype: str = "F32") -> bytes:
    """Return the embeddings of an image as a client computes them."""
    size = {"F32": 4, "F16": 2, "BF16": 2}[dtype]
    return safetensors(
        {
            "embeddings": (dtype, (tokens, width), bytes(tokens * width * size)),
            "grid_thw": ("I64", (3,), struct.pack("<3q", *grid)),
        }
    )


def data_url(content: bytes, kind: str = "image/png") -> str:
    """Return a content as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_of(content: bytes, param: str = "image") -> Media:
    """Return an image by the URL of its content."""
    return by_url(data_url(content), param)


def by_url(url: str, param: str = "image") -> Media:
    """Return an image by its URL."""
    return Media(Modality.IMAGE, url, param=param)
