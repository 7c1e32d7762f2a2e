"""The strict reader of plain heads reads only what h11 reads in the same way."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from supervisor.gateway.http.plain_head import PlainHead, read_plain_head

SIZE_MAX = 64 * 1024
STOCK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:8000\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nUser-Agent: OpenAI/Python 2.1.0\r\nContent-Length: 12\r\n"
    b"Content-Type: application/json\r\nAuthorization: Bearer secret\r\n\r\n"
)

LINES = st.sampled_from(
    [
        b"POST /v1/chat/completions HTTP/1.1\r\n",
        b"GET /v1/models?a=b HTTP/1.1\r\n",
        b"GET http://localhost/v1/models HTTP/1.1\r\n",
        b"POST / HTTP/1.0\r\n",
        b"POST  / HTTP/1.1\r\n",
        b"HEAD / HTTP/1.1\r\n",
        b"GET /\x80 HTTP/1.1\r\n",
        b"GET / HTTP/1.1\n",
    ]
)
NAMES = st.sampled_from(
    [
        b"Host",
        b"host",
        b"Content-Length",
        b"content-length",
        b"Transfer-Encoding",
        b"Connection",
        b"Upgrade",
        b"Expect",
        b"Accept",
        b"X-A",
        b"x a",
        b"Host ",
        b"",
    ]
)
VALUES = st.sampled_from(
    [
        b"localhost",
        b"0",
        b"3",
        b"003",
        b"+3",
        b"3, 3",
        b"3,4",
        b"0x3",
        b"9" * 16,
        b"9" * 21,
        b"chunked",
        b"keep-alive",
        b"Keep-Alive",
        b"close",
        b"keep-alive, Upgrade",
        b"100-continue",
        b"websocket",
        b"a b",
        b"a  b",
        b"a\tb",
        b"a\x00b",
        b"\xe9",
        b"",
        b" ",
    ]
)
COLONS = st.sampled_from([b": "] * 6 + [b":", b" : ", b":\t", b":  "])
ENDS = st.sampled_from([b"\r\n"] * 8 + [b"\n", b" \r\n", b"\r\n ", b"\r\r\n", b"\r"])
FIELDS = st.builds(lambda *parts: b"".join(parts), NAMES, COLONS, VALUES, ENDS)
COMMON = st.sampled_from(
    [b"Host: localhost\r\n", b"Content-Length: 3\r\n", b"Connection: keep-alive\r\n", b"Accept: */*\r\n"]
)
HEADS = st.builds(
    lambda line, fields, end, rest: line + b"".join(fields) + end + rest,
    LINES,
    st.lists(COMMON | FIELDS, max_size=6),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b""]),
    st.binary(max_size=8),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return the head of a stock client, of which some bytes were replaced, inserted or removed."""
    head = bytearray(STOCK)
    for _ in range(draw(st.integers(0, 3))):
        place, removed = draw(st.integers(0, len(head))), draw(st.integers(0, 2))
        head[place : place + removed] = draw(
            st.sampled_from([b"", b"\r", b"\n", b" ", b":", b"\t", b"\x00"]) | st.binary()
        )
    return bytes(head)


def by_h11(received: bytes) -> tuple[h11.Request, bytes]:
    """Return the request that h11 reads, and what it left; raises `h11.RemoteProtocolError`."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=SIZE_MAX)
    connection.receive_data(received)
    request = connection.next_event()
    assert isinstance(request, h11.Request)
    return request, connection.trailing_data[0]


def assert_same_as_h11(received: bytes, plain: PlainHead) -> None:
    request, rest = by_h11(received)
    ours = plain.request
    assert (ours.method, ours.target, ours.http_version) == (request.method, request.target, request.http_version)
    assert list(ours.headers) == list(request.headers)
    assert received[plain.size_bytes :] == rest
    assert plain.body_bytes == int(dict(request.headers).get(b"content-length", b"0"))
    assert dict(request.headers) == ours.values


@given(HEADS | damaged() | st.binary())
@example(STOCK + b"rest")
@example(STOCK)
def test_what_the_strict_reader_reads_h11_reads_in_the_same_way(received: bytes) -> None:
    plain = read_plain_head(received, SIZE_MAX)
    if plain is not None:
        assert_same_as_h11(received, plain)
        assert read_plain_head(bytearray(received), SIZE_MAX) is not None


@pytest.mark.parametrize(
    "head",
    [
        STOCK,
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
        STOCK.replace(b"keep-alive", b"Keep-Alive"),
        STOCK.replace(b"Connection: keep-alive\r\n", b""),
    ],
)
def test_heads_of_stock_clients_are_plain(head: bytes) -> None:
    plain = read_plain_head(head + b"{}", SIZE_MAX)
    assert plain is not None
    assert_same_as_h11(head + b"{}", plain)


@pytest.mark.parametrize(
    ("part", "by"),
    [
        (b"POST", b"HEAD"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b" /v1", b" http://localhost/v1"),
        (b"Host: localhost:8000\r\n", b""),
        (b"Host: localhost:8000\r\n", b"Host: a\r\nHost: a\r\n"),
        (b"Content-Length: 12", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\nTransfer-Encoding: chunked"),
        (b"Content-Length: 12", b"Content-Length: 12\r\ncontent-length: 12"),
        (b"keep-alive", b"close"),
        (b"keep-alive", b"keep-alive, Upgrade"),
        (b"Connection: keep-alive", b"Upgrade: websocket"),
        (b"Connection: keep-alive", b"Expect: 100-continue"),
        (b"\r\n\r\n", b"\r\n"),
    ],
)
def test_any_other_head_is_left_to_h11(part: bytes, by: bytes) -> None:
    assert part in STOCK
    assert read_plain_head(STOCK.replace(part, by, 1), SIZE_MAX) is None


def test_a_head_is_plain_up_to_the_limit_of_its_size() -> None:
    assert read_plain_head(STOCK, len(STOCK)) is not None
    assert read_plain_head(STOCK, len(STOCK) - 1) is None
