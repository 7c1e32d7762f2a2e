"""The type of a content by its first bytes, never by a client's or a server's claim.

A short list is decoded: each more type is one more parser for what strangers send. The others are known by their first
bytes too, so that a refusal can name them.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

IMAGES = "PNG, JPEG, WebP or GIF"
VIDEOS = "MP4, WebM, Matroska or AVI"


class ContentKind(StrEnum):
    """The types that are decoded, each by the name of its plugin of Pillow or of its demuxer of FFmpeg."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WEBP"
    GIF = "GIF"
    MP4 = "mov"
    MATROSKA = "matroska"
    AVI = "avi"
    SAFETENSORS = "safetensors"

    @property
    def is_image(self) -> bool:
        """Whether it is an image."""
        return self in {ContentKind.PNG, ContentKind.JPEG, ContentKind.WEBP, ContentKind.GIF}

    @property
    def is_video(self) -> bool:
        """Whether it is a video."""
        return self in {ContentKind.MP4, ContentKind.MATROSKA, ContentKind.AVI}


@frozen
class Unknown:
    """A type that is not decoded: its name, and perhaps a reason of its own."""

    name: str
    reason: str = ""


_PICKLE = "a pickle can run code: send the embeddings as a safetensors file"
_AUDIO = "audio is not supported"
_SIGNATURES: tuple[tuple[int, bytes, ContentKind | Unknown], ...] = (  # an offset, the bytes there, and the type
    (0, b"\x89PNG\r\n\x1a\n", ContentKind.PNG),
    (0, b"\xff\xd8\xff", ContentKind.JPEG),
    (0, b"GIF87a", ContentKind.GIF),
    (0, b"GIF89a", ContentKind.GIF),
    (0, b"\x1aE\xdf\xa3", ContentKind.MATROSKA),
    (0, b"PK\x03\x04", Unknown("a ZIP archive, as .pt, .pth, .bin and .npz files are", _PICKLE)),
    (0, b"PK\x05\x06", Unknown("a ZIP archive", _PICKLE)),
    *((0, bytes((0x80, version)), Unknown("a pickle", _PICKLE)) for version in range(1, 8)),
    (0, b"\x93NUMPY", Unknown("a NumPy file", "it may hold a pickle, which can run code: send a safetensors file")),
    (0, b"\x89HDF\r\n\x1a\n", Unknown("an HDF5 file")),
    (0, b"GGUF", Unknown("a GGUF file")),
    (0, b"BM", Unknown("BMP")),
    (0, b"II*\x00", Unknown("TIFF")),
    (0, b"MM\x00*", Unknown("TIFF")),
    (0, b"II+\x00", Unknown("TIFF")),
    (0, b"\x00\x00\x01\x00", Unknown("an icon file")),
    (0, b"\x00\x00\x00\x0cjP  ", Unknown("JPEG 2000")),
    (0, b"\xff\x4f\xff\x51", Unknown("JPEG 2000")),
    (0, b"\x00\x00\x00\x0cJXL ", Unknown("JPEG XL")),
    (0, b"\xff\x0a", Unknown("JPEG XL")),
    (0, b"8BPS", Unknown("a Photoshop file")),
    (0, b"%PDF", Unknown("PDF")),
    (0, b"%!PS", Unknown("PostScript")),
    (0, b"FLV", Unknown("Flash video")),
    (0, b"\x30\x26\xb2\x75", Unknown("Windows Media")),
    (0, b"\x00\x00\x01\xba", Unknown("an MPEG stream")),
    (0, b"\x00\x00\x01\xb3", Unknown("an MPEG stream")),
    (0, b"ID3", Unknown("MP3", _AUDIO)),
    (0, b"fLaC", Unknown("FLAC", _AUDIO)),
    (0, b"OggS", Unknown("Ogg", _AUDIO)),
    (0, b"\xff\xfb", Unknown("MP3", _AUDIO)),
    (0, b"\xff\xf1", Unknown("AAC", _AUDIO)),
    (0, b"\xff\xf9", Unknown("AAC", _AUDIO)),
    (0, b"#EXTM3U", Unknown("a playlist")),
    (8, b"WEBP", ContentKind.WEBP),
    (8, b"AVI ", ContentKind.AVI),
    (8, b"WAVE", Unknown("WAV", _AUDIO)),
)
_STILL_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"avif", b"avis"}
_AUDIO_BRANDS = {b"M4A ", b"M4B ", b"M4P "}
_TEXTS = ((b"<svg", "SVG"), (b"<?xml", "XML"), (b"<!doctype", "an HTML page"), (b"<html", "an HTML page"))
# The length of the number before the JSON of a safetensors file.
_HEADER_LENGTH_BYTES = 8


def sniff(head: bytes) -> ContentKind | Unknown:
    """Return the type of a content, given its first bytes: a few dozen are enough."""
    if not head:
        return Unknown("empty", "it has no content")
    for offset, magic, kind in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic and (offset == 0 or head[:4] == b"RIFF"):
            return kind
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in _AUDIO_BRANDS:
            return Unknown("an MPEG-4 audio file", _AUDIO)
        return Unknown("HEIF or AVIF") if brand in _STILL_BRANDS else ContentKind.MP4
    if head[_HEADER_LENGTH_BYTES : _HEADER_LENGTH_BYTES + 1] == b"{" and head[4:8] == bytes(4):
        return ContentKind.SAFETENSORS
    text = head.lstrip().lower()
    name = next((name for beginning, name in _TEXTS if text.startswith(beginning)), "of no type that is known here")
    return Unknown(name)
