"""The type of a content is what its bytes say, and what is not decoded is refused by its name."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable

import pytest

from actors.media.decoder.sniffing import ContentKind, Unknown, sniff
from tests.rig import media_samples as samples

KINDS = [
    (samples.png, ContentKind.PNG),
    (samples.jpeg, ContentKind.JPEG),
    (samples.webp, ContentKind.WEBP),
    (samples.gif, ContentKind.GIF),
    (samples.video, ContentKind.MP4),
    (lambda: samples.video("webm"), ContentKind.MATROSKA),
    (lambda: samples.video("matroska"), ContentKind.MATROSKA),
    (lambda: samples.video("avi"), ContentKind.AVI),
    (samples.embeddings, ContentKind.SAFETENSORS),
]


@pytest.mark.parametrize(("made", "kind"), KINDS, ids=[f"{kind.name}{n}" for n, (_, kind) in enumerate(KINDS)])
def test_what_is_decoded_is_known_by_its_first_bytes(made: Callable[[], bytes], kind: ContentKind) -> None:
    assert sniff(made()[:64]) is kind
    assert [kind.is_image, kind.is_video, kind is ContentKind.SAFETENSORS].count(True) == 1


def archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        written.writestr("archive/data.pkl", pickle.dumps([1]))
    return file.getvalue()


REFUSED = [
    (pickle.dumps({"embeddings": [1.0]}), "a pickle", "run code"),
    (archive(), ".pt, .pth, .bin", "run code"),
    (b"\x93NUMPY\x01\x00", "NumPy", "pickle"),
    (samples.saved(samples.picture(), "BMP"), "BMP", ""),
    (samples.saved(samples.picture(), "TIFF"), "TIFF", ""),
    (samples.saved(samples.picture(), "AVIF"), "HEIF or AVIF", ""),
    (samples.saved(samples.picture(), "JPEG2000"), "JPEG 2000", ""),
    (b"ID3\x04\x00", "MP3", "audio"),
    (b"\xff\xfb\x90\x44", "MP3", "audio"),
    (b"fLaC\x00", "FLAC", "audio"),
    (b"RIFF\x00\x00\x00\x00WAVEfmt ", "WAV", "audio"),
    (b"\x00\x00\x00\x1cftypM4A \x00\x00", "MPEG-4 audio", "audio"),
    (b"  <svg xmlns='http://www.w3.org/2000/svg'>", "SVG", ""),
    (b"<!DOCTYPE html><html>", "HTML", ""),
    (b"%PDF-1.7", "PDF", ""),
    (b"#EXTM3U\nfile:///etc/passwd", "a playlist", ""),
    (b"", "empty", "no content"),
    (b"hello", "of no type", ""),
]


@pytest.mark.parametrize(("content", "name", "reason"), REFUSED, ids=[name for _, name, _ in REFUSED])
def test_what_is_not_decoded_has_a_name(content: bytes, name: str, reason: str) -> None:
    kind = sniff(content[:64])
    assert isinstance(kind, Unknown)
    assert name in kind.name
    assert reason in kind.reason
