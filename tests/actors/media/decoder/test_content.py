"""Data URLs are read as clients write them, and within their limit."""

from __future__ import annotations

import base64
import hashlib
import os

import pytest

from actors.media.decoder import content
from actors.media.decoder.content import ContentRefusal

DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()
URLS = [
    f"data:image/png;base64,{BASE64}",
    f"DATA:image/png;charset=utf-8;BASE64,{BASE64}",
    f"data:;base64,{BASE64.rstrip('=')}",
    f"data:;base64,{base64.urlsafe_b64encode(DATA).decode()}",
    f"data:;base64,{BASE64[:76]}\r\n{BASE64[76:]}",
    f"data:;base64,{BASE64.replace('=', '%3D').replace('+', '%2B')}",
]


@pytest.mark.parametrize("url", URLS, ids=range(len(URLS)))
def test_a_data_url_is_read(url: str) -> None:
    assert content.decode_data_url(url.encode(), 256) == DATA


def test_a_content_that_is_too_large_is_refused() -> None:
    with pytest.raises(ContentRefusal, match="256 bytes; the limit is 255") as caught:
        content.decode_data_url(URLS[0].encode(), 255)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:;base64,a", "base64"),
        ("data:;base64,ab=c", "base64"),
        ("data:;base64,\xe4\xe4", "base64"),
    ],
)
def test_what_is_no_data_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ContentRefusal, match=reason):
        content.decode_data_url(url.encode("latin-1"), 100)


def test_a_content_is_read_from_its_beginning_wherever_its_descriptor_stands() -> None:
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, DATA * 8_000)  # more than is read at once
        assert content.read(descriptor) == DATA * 8_000
        assert content.digest(DATA) == hashlib.sha256(DATA).hexdigest()
    finally:
        os.close(descriptor)
