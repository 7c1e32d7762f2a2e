"""Heads that two servers could read differently are refused."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from supervisor.gateway.http.head_checks import HEADERS_MAX
from tests.rig.gateway import gateway_client, head, leave_all

RAW = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (RAW, 200),
        (RAW.replace(b"1.1\r", b"1.0\r"), 200),
        (b"\r\n" + RAW, 400),
        (RAW.replace(b"HTTP/1.1", b"HTTP/9.9"), 505),
        (RAW.replace(b"HTTP/1.1", b"HTTP/1.2"), 505),
        (RAW.replace(b"\r\n", b"\n"), 400),
        (RAW.replace(b"127.0.0.1\r\n", b"127.0.0.1\n"), 400),
        (RAW.replace(b"\r\n\r\n", b"\r\nx: a\r\n b\r\n\r\n"), 400),
        (RAW.replace(b"\r\n\r\n", b"\r\ntransfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n"), 400),
        (RAW.replace(b"1.1\r", b"1.0\r").replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"), 400),
        (head(origin="http://127.0.0.1").replace(b"\r\n\r\n", b"\r\norigin: http://127.0.0.1\r\n\r\n"), 400),
        (head(authorization="Bearer a").replace(b"\r\n\r\n", b"\r\nauthorization: Bearer b\r\n\r\n"), 400),
        (head(x_api_key="a").replace(b"\r\n\r\n", b"\r\nx-api-key: b\r\n\r\n"), 400),
        (head(path="/v1/models", host="evil.com@127.0.0.1"), 403),
        (head(path="/v1/models", host="127.0.0.1:abc"), 403),
        (head(origin="http://127.0.0.1:3000"), 403),
        (head(origin="chrome-extension://127.0.0.1"), 403),
    ],
)
async def test_a_head_that_a_proxy_may_read_otherwise_is_refused(
    data: bytes, status: int, rather_slow: MockClock
) -> None:
    async with gateway_client(close_s=0.1) as (rig, client):
        reply = await client.ask(data)
        assert reply.status == status
        assert status in {200, 403} or reply.headers["connection"] == "close"
        await leave_all(rig)


@pytest.mark.parametrize(("count", "status"), [(HEADERS_MAX, 200), (HEADERS_MAX + 1, 431)])
async def test_a_head_has_at_most_512_headers(count: int, status: int, rather_slow: MockClock) -> None:
    async with gateway_client(close_s=0.1) as (rig, client):
        assert (await client.ask(RAW[:-2] + b"a:\r\n" * (count - 1) + b"\r\n")).status == status
        await leave_all(rig)


@pytest.mark.parametrize("safe", ["my-id", "a/b:c=d+e._-", "x" * 128])
@pytest.mark.parametrize("unsafe", ['a","k":"v', "a b", "é", "$(id)", "x" * 129, "'"])
async def test_a_request_id_that_is_unsafe_in_logs_is_replaced(safe: str, unsafe: str, rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        assert (await client.ask(head(x_request_id=unsafe))).headers["x-request-id"] == "0" * 31 + "1"
        assert (await client.ask(head(x_request_id=safe))).headers["x-request-id"] == safe


@pytest.mark.parametrize(("path", "line"), [("/health", b"HTTP/1.1 200 OK"), ("/no", b"HTTP/1.1 404 Not Found")])
async def test_a_status_has_its_reason_phrase(path: str, line: bytes, rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        await client.send(head(path=path))
        assert (await client.until(b"\r\n")).strip() == line
