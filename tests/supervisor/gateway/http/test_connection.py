"""Requests over HTTP, right and wrong."""

from __future__ import annotations

import json

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.gateway.http.connection import ON_ITS_WAY_S
from supervisor.gateway.http.request_reader import RequestReader
from tests.rig.gateway import Worker, chat, gateway_client, gateway_rig, head, leave_all, post


async def test_health_readiness_and_models_are_answered(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        health = await client.ask(head())
        assert (health.status, health.body, health.headers["x-request-id"]) == (200, b"alive\n", f"{1:032x}")
        assert (await client.ask(head(path="/ready"))).body == b"ready\n"
        models = (await client.ask(head(path="/v1/models"))).json
        assert [(model["id"], model["root"], model["max_model_len"]) for model in models["data"]] == [
            ("tiny", "tiny", 2048)
        ]
        assert (await client.ask(head(path="/v1/models/tiny?x=1"))).json == models["data"][0]
        assert (await client.ask(head(path="/v1/models/t%69ny"))).status == 200
        rig.ready.append("engine a is starting")
        unready = await client.ask(head(path="/ready"))
        assert (unready.status, unready.error["code"], unready.headers["retry-after"]) == (503, "not_ready", "2")
        assert (await client.ask(head())).status == 200


async def test_a_gateway_without_encoders_is_ready_and_says_what_is_missing(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        rig.gateway.probes = evolve(
            rig.gateway.probes, missing=lambda: "model tiny takes no images and videos: engine eyes is starting"
        )
        answer = await client.ask(head(path="/ready"))
        assert answer.status == 200
        assert answer.body == b"ready, but model tiny takes no images and videos: engine eyes is starting\n"


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (head(path="/nope"), 404, "not_found"),
        (head(path="/v1/models/other"), 404, "model_not_found"),
        (post(chat(model="other")), 404, "model_not_found"),
        (head(path="/v1/chat/completions"), 405, "method_not_allowed"),
        (post({}, "/health"), 405, "method_not_allowed"),
        (head(path="/v1/responses"), 426, "upgrade_required"),
        (post({}, "/v1/responses"), 400, "invalid_request"),
        (head(path="/v1/models", host="evil.example"), 403, "forbidden"),
        (head(origin="https://evil.example"), 403, "forbidden"),
        (head(origin="null"), 403, "forbidden"),
        (post(b"{"), 400, "invalid_request"),
        (post(chat(temperature=9)), 400, "invalid_request"),
        (post(chat(max_tokens=5000)), 400, "context_length_exceeded"),
        (post(chat(store=True)), 400, "unsupported_parameter"),
    ],
)
async def test_a_mistake_gets_its_error_and_keeps_the_connection(
    data: bytes, status: int, code: str, rather_slow: MockClock
) -> None:
    async with gateway_client() as (rig, client):
        for _ in range(2):
            reply = await client.ask(data)
            assert (reply.status, reply.error["code"], reply.whole) == (status, code, True)
            assert reply.headers["x-should-retry"] == "false"
            assert reply.headers.get("allow") in ({"POST, OPTIONS", "GET, HEAD, OPTIONS"} if status == 405 else {None})
            assert reply.headers.get("upgrade") == ("websocket" if status == 426 else None)
        assert (await client.ask(head())).status == 200
        assert rig.worker.prompts == []


@pytest.mark.parametrize("host", ["10.0.3.7:8116", "[fd00::7]:8116", "evil.com@127.0.0.1", ""])
async def test_probes_are_answered_whatever_the_host(host: str, rather_slow: MockClock) -> None:
    """A load balancer or a kubelet sends the address of the machine, and cannot know another name."""
    async with gateway_client() as (_, client):
        for path in ("/health", "/ready", "/metrics"):
            for method in ("GET", "HEAD"):
                reply = await client.ask(head(method, path, host=host))
                assert (reply.status, reply.headers.get("connection")) == (200, None)
            foreign = await client.ask(head("GET", path, host=host, origin="https://evil.example"))
            own = await client.ask(head("GET", path, host=host, origin=f"http://{host}"))
            assert (foreign.status, own.status) == (403, 403)
        assert (await client.ask(head(path="/v1/models", host=host))).status == 403


async def test_a_refused_host_is_told_what_would_allow_it(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        message = (await client.ask(head(path="/v1/models", host="LLM.example.org:443"))).error["message"]
        assert message == (
            "this server does not answer to the host 'LLM.example.org:443'; if that is a name of this server, add it to"
            ' the list of its names in the cluster file: [gateway] allowed_hosts = ["llm.example.org"]'
        )
        assert "allowed_hosts" not in (await client.ask(head(path="/v1/models", host="a@b"))).error["message"]


async def test_head_gets_the_head_of_a_get(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        for path, status in [
            ("/health", 200),
            ("/metrics", 200),
            ("/v1/models", 200),
            ("/nope", 404),
            ("/health", 200),
        ]:
            reply = await client.ask(head("HEAD", path))
            assert (reply.status, reply.headers["content-length"] > "0") == (status, True)
        assert (await client.ask(head())).body == b"alive\n"


async def test_a_chat_completion_in_one_piece(rather_slow: MockClock) -> None:
    async with gateway_rig(worker=Worker(cached=2)) as rig:
        reply = await (await rig.client()).ask(post(chat("n=4"), x_request_id="mine"))
        assert reply.json["choices"][0]["message"]["content"] == "The oak is o"
        assert reply.json["usage"]["completion_tokens"] == 4
        assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert reply.headers["x-request-id"] == "mine"
        await wait_all_tasks_blocked()
        assert (len(rig.gateway.connections), rig.gateway.gate.inside, rig.worker.running) == (1, 0, 0)


async def test_a_streamed_chat_completion_has_its_chunks_in_order(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        reply = await client.ask(post(chat("n=40", stream=True, stream_options={"include_usage": True})))
        assert reply.whole
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.events[-1] == "[DONE]"
        *texts, finish, usage = reply.chunks
        assert texts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert all(chunk["choices"][0]["delta"]["content"] for chunk in texts)
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 40)
        whole = await client.ask(post(chat("n=40")))
        assert reply.text == whole.json["choices"][0]["message"]["content"]


async def test_pipelined_requests_are_answered_in_order(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        await client.send(post(chat("n=3 s=1")) + head() + post(chat("n=2", stream=True)) + head(path="/nope"))
        assert (await client.reply()).json["usage"]["completion_tokens"] == 3
        await client.send(head(path="/ready"))
        assert (await client.reply()).body == b"alive\n"
        assert (await client.reply()).text == "The oak"
        assert (await client.reply()).status == 404
        assert (await client.reply()).body == b"ready\n"


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_body_may_come_in_chunks_and_in_pieces(size: int, rather_slow: MockClock) -> None:
    body = json.dumps(chat("n=3")).encode()
    data = head("POST", "/v1/chat/completions", transfer_encoding="chunked")
    for at in range(0, len(body), 50):
        piece = body[at : at + 50]
        data += b"%x\r\n%b\r\n" % (len(piece), piece)
    data += b"0\r\n\r\n"
    async with gateway_client() as (_, client):
        for at in range(0, len(data), size):
            await client.send(data[at : at + size])
        assert (await client.reply()).status == 200


async def test_expect_100_continue_is_answered_unless_the_request_is_refused(rather_slow: MockClock) -> None:
    body = json.dumps(chat("n=3")).encode()
    async with gateway_client() as (_, client):
        await client.send(head("POST", "/v1/chat/completions", content_length=len(body), expect="100-continue"))
        assert (await client.reply()).status == 100
        await client.send(body)
        assert (await client.reply()).status == 200
        refused = await client.ask(head("POST", "/nope", content_length=5, expect="100-continue"))
        assert (refused.status, refused.headers["connection"]) == (404, "close")


async def test_a_client_that_sends_too_long_a_body_gets_the_error(rather_slow: MockClock) -> None:
    async with gateway_client(body_bytes_max=100_000) as (rig, client):
        reply = await client.ask(post(b"x" * 2_000_000))
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "too_large", "close")
        await leave_all(rig)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a TLS hello
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HEAD /nope\x00 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    ],
)
async def test_garbage_gets_one_error_and_closes_the_connection(
    garbage: bytes, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_client() as (rig, client):
        assert (await client.ask(garbage)).status == 400
        await leave_all(rig)
    assert not caplog.records


async def test_http_1_0_is_served_with_a_host_header_only_unless_it_is_a_probe(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        await client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await client.until(b"\r\n")).split()[1] == b"403"
        # HAProxy's default check has no `Host`.
        for more in (b"", b"host: localhost\r\n"):
            other = await rig.client()
            await other.send(b"GET /health HTTP/1.0\r\n" + more + b"\r\n")
            assert (await other.until(b"\r\n")).split()[1] == b"200"
            await other.until(b"alive\n")
            assert await other.closed()


@pytest.fixture
def drained_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin a drain in the turn before each connection waits for its next request."""
    next_request = RequestReader.next_request

    async def drain_first(reader: RequestReader) -> None:
        reader.gateway.drain()
        await next_request(reader)

    monkeypatch.setattr(RequestReader, "next_request", drain_first)


@pytest.mark.usefixtures("drained_between_requests")
async def test_a_drain_between_two_requests_closes_the_connection_at_once(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        assert "connection" not in (await client.ask(head())).headers
        before = trio.current_time()
        assert await client.closed()
        assert trio.current_time() < before + 1


@pytest.mark.usefixtures("drained_between_requests")
async def test_a_request_that_was_pipelined_before_a_drain_is_answered(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        await client.send(head() * 2)
        assert (await client.reply()).status == 200
        last = await client.reply()
        assert (last.status, last.headers["connection"]) == (200, "close")
        assert await client.closed()


async def test_a_request_on_its_way_when_its_connection_ends_causes_no_reset(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_request = RequestReader.next_request
    async with gateway_client() as (rig, client):

        async def send_first(reader: RequestReader) -> None:
            rig.gateway.drain()
            await client.send(head())  # nobody reads it before the connection ends
            await next_request(reader)

        monkeypatch.setattr(RequestReader, "next_request", send_first)
        assert (await client.ask(head())).status == 200
        assert await client.stream.receive_some(10) == b""  # a reset would raise
        await leave_all(rig)


async def test_what_comes_after_the_end_of_an_idle_connection_is_read_away(rather_slow: MockClock) -> None:
    async with gateway_client(idle_s=5.0) as (rig, client):
        assert (await client.ask(head())).status == 200
        assert await client.closed()
        for _ in range(3):  # a reset would be noticed when the next is sent
            await client.send(head())
            await trio.sleep(ON_ITS_WAY_S / 4)
        assert await client.closed()
        with trio.fail_after(ON_ITS_WAY_S):
            await rig.gateway.connections.wait_closed()


async def test_the_rest_of_a_head_that_comes_late_does_not_reset_its_answer(rather_slow: MockClock) -> None:
    async with gateway_client(head_s=5.0) as (_, client):
        await client.send(head()[:20])
        await trio.sleep(5.1)
        for _ in range(3):
            await client.send(b"x-late: 1\r\n")
            await trio.sleep(0.1)
        assert (await client.reply()).error["code"] == "slow_client"
        assert await client.closed()
