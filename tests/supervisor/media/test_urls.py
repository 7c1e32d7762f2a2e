"""URLs are read strictly: what a check sees is what is asked."""

from __future__ import annotations

import pytest

from protocol.dialects.media_urls import LocatesMedia
from protocol.errors import BadRequest, RequestError, TooLarge, Unsupported
from supervisor.config.media import HostPattern
from supervisor.media.urls import FileUrl, WebUrl, check_allowed, check_data, is_data, parse

VALID = [
    ("https://a.example/x.png", WebUrl("https", "a.example", 443, "/x.png"), "a.example"),
    ("HTTP://A.Example:8080", WebUrl("http", "a.example", 8080, "/"), "a.example:8080"),
    ("https://a.example.:443/x?y=z#part", WebUrl("https", "a.example", 443, "/x?y=z"), "a.example"),
    ("https://[2001:DB8:0::1]:8443/", WebUrl("https", "2001:db8::1", 8443, "/"), "[2001:db8::1]:8443"),
    ("http://127.0.0.1:80/a%20b", WebUrl("http", "127.0.0.1", 80, "/a%20b"), "127.0.0.1"),
]


@pytest.mark.parametrize(("text", "url", "authority"), VALID, ids=[text for text, _, _ in VALID])
def test_a_url_has_parts(text: str, url: WebUrl, authority: str) -> None:
    assert parse(text) == url
    assert url.authority == authority


def test_a_file_url_has_a_path() -> None:
    assert parse("file:///pictures/a%20b.png") == FileUrl("/pictures/a b.png")
    assert parse("file://localhost/pictures/%C3%A4.png") == FileUrl("/pictures/ä.png")


REFUSED: list[tuple[str, type[RequestError], str]] = [
    ("https://user:secret@a.example/", BadRequest, "user name or a password"),
    ("https://user@a.example/", BadRequest, "user name"),
    ("https://a.example\\@evil.example/", BadRequest, "printable ASCII"),
    ("https://a.example/ä", BadRequest, "printable ASCII"),
    ("https://a.exam\nple/", BadRequest, "printable ASCII"),
    ("https://a.example/x y", BadRequest, "printable ASCII"),
    ("https://a.example:99999/", BadRequest, "no valid URL"),
    ("https://a.example:x/", BadRequest, "no valid URL"),
    ("https://a.example:0/", BadRequest, "host of the URL"),
    ("https:///path", BadRequest, "host of the URL"),
    ("https://a%2eexample/", BadRequest, "host of the URL"),
    ("https://[::1/", BadRequest, "no valid URL"),
    ("https://[fe80::1%25eth0]/", BadRequest, "IPv6"),
    ("https://a.example/" + "x" * 9_000, BadRequest, "characters; the limit is 8,192"),
    ("ftp://a.example/", Unsupported, "must begin with data:, https:, http: or file:"),
    ("gopher://a.example/", Unsupported, "must begin"),
    ("javascript:alert(1)", Unsupported, "must begin"),
    ("a.png", Unsupported, "must begin"),
    ("", BadRequest, "printable ASCII"),
    ("file://other/etc/passwd", BadRequest, "without a host"),
    ("file:///etc/passwd?x", BadRequest, "without a host"),
    ("file:etc/passwd", BadRequest, "absolute path"),
    ("file:///etc/%00passwd", BadRequest, "absolute path"),
    ("https://a.example/model.pt", Unsupported, "a pickle can run code"),
    ("https://a.example/weights.BIN?download=1", Unsupported, "a pickle can run code"),
    ("file:///pictures/embeddings.p%74h", Unsupported, "a pickle can run code"),
    ("file:///pictures/a.npy", Unsupported, "a pickle can run code"),
]


@pytest.mark.parametrize(("text", "error", "reason"), REFUSED, ids=[text[:40] for text, _, _ in REFUSED])
def test_what_is_no_plain_url_is_refused(text: str, error: type[RequestError], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        parse(text)
    assert type(caught.value) is error


def test_a_data_url_is_known_and_bounded_by_its_length() -> None:
    assert is_data("DATA:image/png;base64,abc")
    assert not is_data("https://data:")
    check_data("data:;base64," + "%41" * 100, 100)
    with pytest.raises(TooLarge, match="can have 100 bytes"):
        check_data("data:;base64," + "a" * 9_000, 100)


@pytest.mark.parametrize("url", ["data:,a", "data:image/png,%89PNG", "data:;base64", f"data:{'x' * 300};base64,AAAA"])
def test_a_data_url_that_no_client_may_send_is_refused_as_at_the_gateway(url: str) -> None:
    assert LocatesMedia().mistake(url) is not None
    with pytest.raises(BadRequest, match=r"^the URL must (be base64|have a comma within 256 characters)"):
        check_data(url, 1_000)


def test_nothing_is_allowed_unless_it_is_named() -> None:
    url = parse("https://a.example/")
    assert isinstance(url, WebUrl)
    with pytest.raises(BadRequest, match=r"does not fetch from a.example; it fetches from none: send .* a data URL"):
        check_allowed(url, [])
    with pytest.raises(BadRequest, match=r"does not fetch from a.example$"):
        check_allowed(url, [HostPattern("b.example")])
    check_allowed(url, [HostPattern("b.example"), HostPattern("a.example")])
