"""Hosts with their ports, and the origins of pages, are parsed strictly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.gateway.origins import Authority, authority, same_origin


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost", Authority("localhost")),
        ("LOCALHOST:8000", Authority("localhost", 8000)),
        ("localhost:", Authority("localhost")),
        ("[::1]:80", Authority("::1", 80)),
        ("a_b.example", Authority("a_b.example")),
        ("evil.com@localhost", None),
        ("localhost#.evil.com", None),
        ("localhost/evil", None),
        ("localhost:abc", None),
        ("localhost:65536", None),
        ("localhost:80:80", None),
        ("[localhost]", None),
        ("local host", None),
        ("localhost\n", None),
        ("", None),
        (":80", None),
    ],
)
def test_a_host_header_is_a_host_with_or_without_a_port(text: str, expected: Authority | None) -> None:
    assert authority(text) == expected


@given(st.text(max_size=40))
def test_a_parsed_host_has_no_delimiters(text: str) -> None:
    if (found := authority(text)) is not None:
        assert not set(found.host) & set("@/?#\\%[] \t\r\n")


HERE = Authority("localhost", 8000)


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://localhost:8000", HERE, True),
        ("HTTP://LOCALHOST:8000", HERE, True),
        ("https://localhost:8000", HERE, True),
        ("http://localhost:3000", HERE, False),
        ("http://127.0.0.1:8000", HERE, False),
        ("http://localhost", HERE, False),
        ("http://app.example", Authority("app.example"), True),
        ("https://app.example", Authority("app.example", 443), True),
        ("https://app.example:443", Authority("app.example"), True),
        ("http://app.example", Authority("app.example", 443), False),
        ("file://localhost:8000", HERE, False),
        ("chrome-extension://localhost:8000", HERE, False),
        ("http://evil@localhost:8000", HERE, False),
        ("http://localhost:8000/", HERE, False),
        ("http://localhost:8000#x", HERE, False),
        ("null", HERE, False),
    ],
)
def test_an_origin_is_the_same_by_scheme_host_and_port(origin: str, host: Authority, same: bool) -> None:
    assert same_origin(origin, host) is same
