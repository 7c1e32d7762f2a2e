"""HTTP at its edges: methods, media types, lengths, trailers, and pipelined requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from supervisor.gateway.http.request_reader import PIPELINED_BYTES_MAX
from tests.rig.gateway import at_rest, chat, frame, gateway_client, gateway_rig, head, leave_all, post

CHAT = "/v1/chat/completions"
GETS, POSTS = "GET, HEAD, OPTIONS", "POST, OPTIONS"


# Methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/health", GETS),
        ("/v1/models", GETS),
        ("/v1/models/tiny", GETS),
        ("/server_info", GETS),
        (CHAT, POSTS),
        ("/v1/completions", POSTS),
        ("/tokenize", POSTS),
        ("/v1/responses", "GET, HEAD, POST, OPTIONS"),
        ("/flush_cache", "GET, HEAD, POST, OPTIONS"),
    ],
)
async def test_options_lists_the_methods_of_a_path_and_others_get_405(
    path: str, allow: str, rather_slow: MockClock
) -> None:
    async with gateway_client() as (_, client):
        await client.send(head("OPTIONS", path))
        reply = await client.reply(head_only=True)
        assert (reply.status, reply.headers["allow"]) == (204, allow)
        assert not {"content-length", "transfer-encoding"} & reply.headers.keys()
        for method in ("DELETE", "PUT", "BREW", "TRACE", *(("GET", "HEAD") if allow == POSTS else ())):
            reply = await client.ask(head(method, path))
            assert (reply.status, reply.headers["allow"]) == (405, allow)
        assert (await client.ask(head())).status == 200


async def test_options_of_the_server_as_a_whole_lists_all_methods(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        await client.send(head("OPTIONS", "*"))
        reply = await client.reply(head_only=True)
        assert (reply.status, reply.headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
        assert (await client.ask(head("OPTIONS", "/nope"))).status == 404
        assert (await client.ask(head("GET", "*"))).status == 405
        refused = await client.ask(head("CONNECT", "127.0.0.1:80"))
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD, POST, OPTIONS")


async def test_a_page_of_an_allowed_origin_gets_its_preflight_and_may_read_responses(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        rig.gateway.origins = evolve(rig.gateway.origins, origins=frozenset({"https://friend.example"}))
        client = await rig.client()
        wishes = {"origin": "https://friend.example", "access_control_request_method": "POST"}
        await client.send(head("OPTIONS", CHAT, **wishes, access_control_request_headers="authorization"))
        reply = await client.reply(head_only=True)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "https://friend.example")
        assert reply.headers["access-control-allow-headers"] == "authorization"
        origin = {"origin": wishes["origin"]}
        for data, status in [(head(**origin), 200), (head(path="/no", **origin), 404), (post(b"{", **origin), 400)]:
            reply = await client.ask(data)
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, "https://friend.example")
        stream = await client.ask(post(chat("n=2", stream=True), origin=wishes["origin"]))
        assert stream.headers["access-control-allow-origin"] == "https://friend.example"
        evil = {"origin": "https://evil.example"}
        for data in (head("OPTIONS", CHAT, **wishes | evil), post(chat(), **evil)):
            refused = await client.ask(data)
            assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)


async def test_every_response_has_an_id_and_a_date(rather_slow: MockClock) -> None:
    async with gateway_client(body_bytes_max=1000) as (_, client):
        for data, status in [
            (head(x_request_id="mine"), 200),
            (head("HEAD", x_request_id="mine"), 200),
            (head(path="/no", x_request_id="mine"), 404),
            (head("PUT", x_request_id="mine"), 405),
            (post(chat("n=2", stream=True), x_request_id="mine"), 200),
            (post(b"x", content_encoding="gzip", x_request_id="mine"), 415),
            (post(b"x" * 2000, x_request_id="mine"), 413),
        ]:
            reply = await client.ask(data)
            assert (reply.status, reply.headers["x-request-id"]) == (status, "mine")
            assert reply.headers["date"] == "Tue, 14 Nov 2023 22:13:20 GMT"


async def test_a_request_target_may_be_a_whole_url(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        assert (await client.ask(head(path="http://127.0.0.1/health?x=1"))).body == b"alive\n"
        assert (await client.ask(head(path="http://127.0.0.1"))).status == 404
        assert (await client.ask(head(path="http://[::1/health"))).status == 404
        assert (await client.ask(head(path="//health"))).status == 404


# Media -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "media",
    [
        None,
        "application/json",
        "Application/JSON; charset=UTF-8",
        "text/json",
        "application/problem+json",
        "application/x-www-form-urlencoded",
    ],
)
async def test_json_is_read_under_each_of_its_media_types(media: str | None, rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        headers = {} if media is None else {"content_type": media}
        body = b" \r\n" + json.dumps(chat("n=2")).encode()
        reply = await (await rig.client()).ask(post(body, content_encoding="identity", **headers))
        assert reply.status == 200


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"a=1&b=2", {"content_type": "application/x-www-form-urlencoded"}),
        (b"", {"content_type": "application/x-www-form-urlencoded"}),
        (b"{}", {"content_type": "text/plain"}),
        (b"{}", {"content_type": "multipart/form-data; boundary=x"}),
        (b"{}", {"content_type": "application/json, text/plain"}),
        (b"{}", {"content_type": "application/jsonish"}),
        (b"{}", {"content_encoding": "gzip"}),
        (b"{}", {"content_encoding": "identity, br"}),
    ],
)
async def test_other_media_types_and_encodings_get_415_with_the_accepted_ones(
    body: bytes, headers: dict[str, str], rather_slow: MockClock
) -> None:
    async with gateway_client() as (_, client):
        reply = await client.ask(post(body, **headers))
        assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")
        assert (reply.headers["accept"], reply.headers["accept-encoding"]) == ("application/json", "identity")
        assert (await client.ask(post(chat("n=1")))).status == 200


async def test_the_body_of_a_get_is_ignored(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        reply = await client.ask(head(content_length=5, content_type="text/plain") + b"hello")
        assert (reply.status, reply.body) == (200, b"alive\n")
        assert (await client.ask(head(path="/v1/responses", content_type="text/plain"))).status == 426


# Lengths -----------------------------------------------------------------------------------------


async def test_a_body_with_two_lengths_is_refused_and_so_is_an_unknown_coding(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        cases: list[tuple[dict[str, Any], int]] = [
            ({"content_length": 5, "transfer_encoding": "chunked"}, 400),
            ({"transfer_encoding": "gzip"}, 501),
            ({"transfer_encoding": "gzip, chunked"}, 501),
            ({"content_length": "5, 6"}, 400),
            ({"content_length": "+5"}, 400),
            ({"content_length": "9" * 400}, 400),
        ]
        for headers, status in cases:
            client = await rig.client()
            reply = await client.ask(head("POST", CHAT, **headers) + b"5\r\nhello\r\n0\r\n\r\n")
            assert (reply.status, reply.headers["connection"]) == (status, "close"), headers
            await client.stream.aclose()
        await at_rest(rig)


async def test_a_request_with_two_lengths_closes_its_connection(rather_slow: MockClock) -> None:
    both: dict[str, Any] = {"content_length": 60, "transfer_encoding": "chunked"}
    async with gateway_rig() as rig:
        rig.gateway.origins = evolve(rig.gateway.origins, origins=frozenset({"https://friend.example"}))
        ahead: dict[str, Any] = {"origin": "https://friend.example", "access_control_request_method": "POST"}
        for data, status in [
            (head("OPTIONS", CHAT, **ahead, **both), 204),
            (head("OPTIONS", CHAT, **both), 400),
            (head("POST", CHAT, host="evil.example", **both), 403),
            (head("POST", "/nope", **both), 400),
        ]:
            client = await rig.client()
            await client.send(data + b"0\r\n\r\n" + head(path="/v1/models"))  # the last one smuggled in
            reply = await client.reply(head_only=status == 204)
            assert (reply.status, reply.headers["connection"]) == (status, "close")
            with trio.fail_after(1):
                assert await client.closed()
            await client.stream.aclose()
        await at_rest(rig)


@pytest.mark.parametrize(("trailers", "status"), [(b"x: y\r\nx-request-id: z\r\n", 200), (b"x: y" * 20_000, 431)])
async def test_trailers_are_ignored_but_limited(trailers: bytes, status: int, rather_slow: MockClock) -> None:
    body = json.dumps(chat("n=2")).encode()
    async with gateway_client() as (rig, client):
        data = head("POST", CHAT, transfer_encoding="chunked") + b"%x;a=b\r\n%b\r\n0\r\n" % (len(body), body)
        reply = await client.ask(data + trailers + b"\r\n")
        assert reply.status == status
        assert reply.headers["x-request-id"] != "z"
        await leave_all(rig)


# Pipelining ----------------------------------------------------------------------------------------


async def test_pipelined_requests_beyond_the_limit_close_the_connection_after_the_response(
    rather_slow: MockClock,
) -> None:
    async with gateway_rig() as rig:
        for stream in (False, True):
            client = await rig.client()
            await client.send(post(chat("n=3 s=1", stream=stream)))
            await trio.sleep(0.1)
            await client.send(head() * (2 * PIPELINED_BYTES_MAX // len(head())))
            reply = await client.reply()
            assert (reply.status, reply.whole) == (200, True)
            assert reply.headers["connection"] == "close"
            assert await client.closed()
            await client.stream.aclose()
        await at_rest(rig)


async def test_requests_that_were_pipelined_earlier_count_into_the_limit(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        most = head() * (PIPELINED_BYTES_MAX // len(head()) - 20)
        await client.send(post(chat("n=3 s=1")) * 2 + most)
        assert "connection" not in (await client.reply()).headers
        await client.send(most)
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert await client.closed()


async def test_a_client_that_leaves_is_noticed_behind_pipelined_requests(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        await client.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        await client.send(head() * (2 * PIPELINED_BYTES_MAX // len(head())))
        await leave_all(rig)
        assert trio.current_time() < 2
        assert rig.worker.left == 1


# Connections ---------------------------------------------------------------------------------------


async def test_a_connection_closes_when_its_client_asks_for_it(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        assert (await client.ask(head(connection="close"))).headers["connection"] == "close"
        assert await client.closed()
        await leave_all(rig)


async def test_an_upgrade_to_something_else_is_ignored(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        wishes = {"upgrade": "h2c", "connection": "Upgrade, HTTP2-Settings", "http2_settings": "AAMAAABkAAQAAP__"}
        for _ in range(2):
            assert (await client.ask(post(chat("n=2"), **wishes))).status == 200
        assert (await client.ask(head("GET", "/v1/responses", **wishes))).status == 426
        assert (await client.upgrade("/v1/models")).status == 200
        assert (await client.ask(head())).status == 200


async def test_a_handshake_with_a_body_is_refused(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        reply = await client.upgrade(content_length=5)
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert (await (await rig.client()).upgrade(content_length=0)).status == 101
        other = await rig.client()
        assert (await other.upgrade(transfer_encoding="chunked")).status == 400
        await other.send(frame(b"{}"))
