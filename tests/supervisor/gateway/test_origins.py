"""Host, Origin and CORS: which requests of browsers are accepted, and what a page may read."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import Forbidden
from supervisor.gateway.origins import Origins

APP = b"https://app.example"


def make_origins(allowed: tuple[()] | list[Any] = (), hosts: tuple[str] | list[Any] = ("localhost",)) -> Origins:
    return Origins(frozenset(hosts), frozenset(allowed))


def page(origin: bytes = APP, host: bytes = b"localhost:8000", **more: bytes) -> list[tuple[bytes, bytes]]:
    given = [(b"host", host), (b"origin", origin)]
    return given + [(name.replace("_", "-").encode(), value) for name, value in more.items()]


def preflight(**more: bytes) -> list[tuple[bytes, bytes]]:
    return page(access_control_request_method=b"POST", **more)


def allowed_to(origins: Origins, headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the headers of the answer to a preflight."""
    allowed = origins.preflight_headers(headers)
    assert allowed is not None
    return dict(allowed)


def test_a_page_of_an_allowed_origin_may_read_responses_and_others_are_refused() -> None:
    origins = make_origins(["https://app.example"])
    origins.check_headers(page())
    cors = dict(origins.cors_headers(page()))
    assert cors[b"access-control-allow-origin"] == APP
    assert cors[b"vary"] == b"origin"
    assert b"access-control-allow-credentials" not in cors
    for foreign in (b"https://evil.example", b"http://app.example", b"https://app.example:444", b"null", b""):
        with pytest.raises(Forbidden, match="may not use this server"):
            origins.check_headers(page(foreign))
        assert origins.cors_headers(page(foreign)) == [(b"vary", b"origin")]
        assert origins.preflight_headers(page(foreign, access_control_request_method=b"POST")) is None
    assert origins.cors_headers([(b"host", b"localhost")]) == [(b"vary", b"origin")]


def test_a_preflight_allows_the_requested_headers_if_they_are_valid() -> None:
    origins = make_origins(["https://app.example"])
    asked = b"authorization, content-type, x-stainless-os"
    allowed = allowed_to(origins, preflight(access_control_request_headers=asked))
    assert allowed[b"access-control-allow-headers"] == asked
    assert b"POST" in allowed[b"access-control-allow-methods"]
    assert b"access-control-allow-private-network" not in allowed
    for odd in (b"a\r\nset-cookie: x", b"x" * 5000, b""):
        answered = allowed_to(origins, preflight(access_control_request_headers=odd))
        assert b"access-control-allow-headers" not in answered
    assert origins.preflight_headers(page()) is None  # a plain OPTIONS
    private = preflight(access_control_request_private_network=b"true")
    assert allowed_to(origins, private)[b"access-control-allow-private-network"] == b"true"


def test_a_cross_site_request_without_an_origin_is_refused() -> None:
    origins = make_origins(["https://app.example"])
    with pytest.raises(Forbidden):
        origins.check_headers([(b"host", b"localhost"), (b"sec-fetch-site", b"cross-site")])
    for site in (b"same-origin", b"none"):
        origins.check_headers([(b"host", b"localhost"), (b"sec-fetch-site", site)])
    origins.check_headers(page(sec_fetch_site=b"cross-site"))


def test_without_origins_there_is_no_cors() -> None:
    origins = make_origins()
    assert origins.cors_headers(page()) == []
    assert origins.preflight_headers(preflight()) is None
    with pytest.raises(Forbidden):
        origins.check_headers(page())
    origins.check_headers(page(b"http://localhost:8000"))


def test_a_wildcard_allows_every_origin_or_every_host() -> None:
    origins = make_origins(["*"], hosts=["*"])
    origins.check_headers(page(b"https://any.example", b"any.name:443"))
    assert dict(origins.cors_headers(page(b"null")))[b"access-control-allow-origin"] == b"null"
    named = make_origins(hosts=["*"])
    named.check_headers([(b"host", b"any.name")])
    for origin in (b"https://any.name", b"http://*"):
        with pytest.raises(Forbidden):  # if any name is allowed, none shows that a page is the server's own
            named.check_headers(page(origin, b"any.name"))
    with pytest.raises(Forbidden):
        named.check_headers([(b"host", b"")])
