"""URLs of images and videos are checked as far as that needs no network, no file and no look at megabytes."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.dialects.media_urls import DATA_HEAD_CHARACTERS_MAX, URL_CHARACTERS_MAX, EmbeddingsFile, LocatesMedia
from protocol.strict.mistakes import Mistakes

PNG = "data:image/png;base64,"


def mistake(url: str) -> str | None:
    return LocatesMedia().mistake(url)


@pytest.mark.parametrize(
    "url",
    [
        PNG + "AAAA",
        "data:;base64,AAAA",
        "DATA:video/mp4;charset=x;BASE64,AAAA",
        "https://media.example/cat.png",
        "HTTPS://media.example:8443/a%20b/cat?size=1&x=.pt#top",
        "http://127.0.0.1/cat.png",  # hosts are checked where their addresses are known
        "http://[2001:db8::1]:80/cat",
        "https://media.example",
        "file:///srv/media/cat.png",
        "file:/srv/media/cat.safetensors",
        "file://localhost/srv/media/../cat.png",
        "https://a.example/" + "x" * (URL_CHARACTERS_MAX - 18),
    ],
)
def test_urls_that_may_be_fetched_pass(url: str) -> None:
    assert mistake(url) is None


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", 'must be a URL that begins with data:, https:, http: or file:, got ""'),
        ("ftp://a.example/", 'must be a URL that begins with data:, https:, http: or file:, got "ftp://a.example/"'),
        (" https://a.example/", "must be a URL that begins with"),
        ("iVBORw0KGgo" + "A" * 1_000_000, "must be a URL that begins with"),
        ("data:", "must have a comma within 256 characters"),
        ("data:" + "x" * DATA_HEAD_CHARACTERS_MAX + ";base64,AAAA", "must have a comma within 256 characters"),
        ("data:image/png,%89PNG", "must be base64"),
        (PNG, "has no data behind its comma"),
        ("https://", "has no host"),
        ("https:///cat.png", "has no host"),
        ("https://user:secret@a.example/", "must not contain a user name or a password"),
        ("https://a.example:http/", "is no URL that can be read"),
        ("https://[::1/", "is no URL that can be read"),
        ("https://a.example/\r\nhost: b.example", 'must not contain "\\r": percent-encode it'),
        ("https://a.example\\@b.example/", 'must not contain "\\\\": percent-encode it'),
        ("https://а.example/", 'must not contain "а": percent-encode it'),  # noqa: RUF001  # a Cyrillic letter
        ("https://a.example/a b", 'must not contain " ": percent-encode it'),
        ("https://a.example/" + "x" * URL_CHARACTERS_MAX, "must have at most 8192 characters, has 8210"),
        ("file:cat.png", "must name a file by its whole path"),
        ("file://media.example/cat.png", "must name a file by its whole path"),
        ("file:///srv/cat?.png", "must have nothing behind its path"),
    ],
)
def test_urls_that_nobody_may_fetch_are_refused_and_say_what_is_wrong(url: str, sentence: str) -> None:
    found = mistake(url) or ""
    assert found.startswith(sentence)
    assert len(found) < 150
    assert "secret" not in found


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".PT", "%2Ept"])
@pytest.mark.parametrize("head", ["https://a.example/image", "file:///srv/media/image"])
def test_pickles_are_refused_by_their_name(head: str, suffix: str) -> None:
    found = mistake(head + suffix) or ""
    assert "a pickle can run code when it is read; send a safetensors file" in found
    assert f"a {suffix.lower().replace('%2e', '.')} file" in found


def test_a_data_url_of_any_length_is_checked_in_no_time() -> None:
    url = PNG + "A" * 20_000_000
    start = time.perf_counter()
    assert mistake(url) is None
    assert time.perf_counter() - start < 0.005


@given(st.text(max_size=60) | st.from_regex(r"(https?|file|data):[\s\S]{0,60}", fullmatch=True))
def test_any_text_is_accepted_or_refused_in_a_line(url: str) -> None:
    assert len(mistake(url) or "") < 200


def test_a_safetensors_file_in_base64_becomes_a_data_url() -> None:
    assert EmbeddingsFile.from_value("UAAA").url == "data:application/octet-stream;base64,UAAA"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "must not be empty"),
        ("UEsDBAAAAA", "is a pickle, as torch.save writes it"),
        ("gAJ9cQAu", "is a pickle, as torch.save writes it"),
        ("gAWVAAAA", "is a pickle, as torch.save writes it"),
        ("https://a.example/image.safetensors", "must be the base64 of a safetensors file"),
        ("data:application/octet-stream;base64,UAAA", "must be the base64 of a safetensors file"),
    ],
)
def test_what_is_certainly_no_safetensors_file_is_refused(value: str, sentence: str) -> None:
    with pytest.raises(Mistakes, match=sentence):
        EmbeddingsFile.from_value(value)
