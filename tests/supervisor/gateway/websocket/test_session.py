"""One WebSocket: its handshake, its events, its mistakes and its ends."""

from __future__ import annotations

import json
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.testing import MockClock

from supervisor.gateway.origins import Origins
from supervisor.gateway.websocket import message_reader
from tests.rig.dialects import response_event_types
from tests.rig.gateway import (
    Worker,
    at_rest,
    chat,
    create,
    frame,
    gateway_client,
    gateway_rig,
    handshake,
    head,
    leave,
    leave_all,
    post,
)
from tests.rig.sockets import gateway_websocket, last_event, output_text, types, websocket_client, whole


async def test_the_events_of_a_response_are_in_the_order_that_clients_expect(rather_slow: MockClock) -> None:
    async with gateway_websocket(worker=Worker(cached=1)) as (_, client):
        await client.say(create("n=3", stream_id="lane"))
        events = await client.events()
        assert types(events) == response_event_types(3)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert {event["stream_id"] for event in events} == {"lane"}
        assert output_text(events) == "The oak is"
        usage = events[-1]["response"]["usage"]
        assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (3, 1)
        last = await last_event(client, create("n=9", max_output_tokens=2))
        assert (last["type"], last["response"]["incomplete_details"]) == (
            "response.incomplete",
            {"reason": "max_output_tokens"},
        )


async def test_a_handshake_is_accepted_with_the_proof_of_its_key(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        reply = await client.upgrade(sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==")  # of RFC 6455, section 1.3
        assert reply.status == 101
        assert reply.headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert (reply.headers["upgrade"].lower(), reply.headers["connection"].lower()) == ("websocket", "upgrade")
        await leave_all(rig)


async def test_an_upgrade_may_follow_requests_and_be_followed_by_messages_at_once(rather_slow: MockClock) -> None:
    async with gateway_client() as (_, client):
        assert (await client.ask(head())).status == 200
        assert (await client.ask(post(chat("n=2")))).status == 200
        lines = {"upgrade": "WebSocket", "connection": "keep-alive, Upgrade", "x_request_id": "mine"}
        request = handshake("/v1/responses?model=tiny", **lines)
        hello = {"type": "response.create", "input": "n=2"}
        await client.send(request[:50])
        await client.send(request[50:] + frame(json.dumps(hello).encode()))
        reply = await client.reply()
        assert (reply.status, reply.headers["x-request-id"]) == (101, "mine")
        events = await client.events()
        assert output_text(events) == "The oak", events


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"host": "evil.example"}, 403),
        ({"sec_websocket_version": 8}, 400),
        ({"sec_websocket_key": None}, 400),
        ({"connection": "keep-alive"}, 400),
    ],
)
async def test_a_wrong_upgrade_is_refused_over_http_and_closes_the_connection(
    headers: dict[str, Any], status: int, rather_slow: MockClock
) -> None:
    async with gateway_client() as (rig, client):
        reply = await client.upgrade(**headers)
        assert (reply.status, reply.whole, reply.headers["connection"]) == (status, True, "close")
        assert await client.closed()
        await leave_all(rig)


@pytest.mark.parametrize("twice", ["connection: close", "sec-websocket-key: eA==", "sec-websocket-version: 8"])
async def test_a_handshake_that_can_be_read_in_two_ways_is_refused(twice: str, rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        await client.send(handshake()[:-2] + twice.encode() + b"\r\n\r\n")
        assert (await client.reply()).status == 400
        await leave_all(rig)


@pytest.mark.parametrize("line", ["sec-websocket-protocol: \xff", "sec-websocket-extensions: a\xe9", "host: xn--a"])
async def test_headers_that_the_library_cannot_read_do_not_fail_a_handshake(
    line: str, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a client may use another name of the host, or offer another extension."""
    async with gateway_rig() as rig:
        rig.gateway.origins = Origins(frozenset({"*"}))
        client = await rig.client()
        if line.startswith("host: "):
            await client.send(handshake(host=line[6:]))
        else:
            await client.send(handshake()[:-2] + line.encode("latin-1") + b"\r\n\r\n")
        assert (await client.reply()).status == 101
        await leave_all(rig)
    assert "a bug ended a connection" not in caplog.messages


@pytest.mark.parametrize("key", ["x", "%%%", "dGhlIHNhbXBsZSBub25jZQ==" * 50])
async def test_an_invalid_websocket_key_leaves_nothing_behind(key: str, rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, client):
        await client.upgrade(sec_websocket_key=key)
        await leave_all(rig)


async def test_mistakes_in_messages_are_error_events_and_the_socket_stays_open(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        for event, status, code in [
            (b"{", 400, "invalid_request"),
            ({"type": "nope"}, 400, "unsupported_parameter"),
            (create(model="other", stream_id="a"), 404, "model_not_found"),
            (create(temperature=9), 400, "invalid_request"),
            (create(previous_response_id="resp_x"), 400, "previous_response_not_found"),
            (create(max_output_tokens=5000), 400, "context_length_exceeded"),
        ]:
            await client.say(event)
            error = await client.event()
            assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
            assert error.get("stream_id") == (event.get("stream_id") if isinstance(event, dict) else None)
        await client.say(b"\x00\x01", first=0x82)
        assert "binary" in (await client.event())["error"]["message"]
        await client.say(create("n=2"))
        assert output_text(await client.events()) == "The oak"


async def test_a_ping_is_answered_during_a_response(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=50 s=1"))
        await client.events("response.output_text.delta")
        await client.send(frame(b"are you there", 0x89))
        before = trio.current_time()
        kinds = []
        while (got := await client.frame())[0] != 0x8A:
            kinds.append(got)
        assert got[1] == b"are you there"
        assert trio.current_time() - before <= 1.1
        await leave_all(rig)


async def test_cancelling_ends_a_response_as_incomplete_with_its_usage(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=50 s=1", stream_id="a"))
        started = await client.events("response.output_text.delta")
        response_id = started[0]["response"]["id"]
        await client.say({"type": "response.cancel", "response_id": "resp_other"})
        await client.say({"type": "response.cancel", "stream_id": "b"})
        await client.events("response.output_text.delta")
        last = await whole(client, {"type": "response.cancel", "response_id": response_id})
        assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "cancelled"})
        assert last["usage"]["output_tokens"] == len(last["output"][0]["content"][0]["text"].split()) == 2
        assert last["output"][0]["status"] == "incomplete"
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.worker.running, rig.worker.left) == (0, 1)
        await client.say({"type": "response.cancel"})  # nothing runs, which is no mistake
        assert (await whole(client, create("n=1", previous_response_id=response_id)))["status"] == "completed"
        assert "The oak<|im_end|>" in rig.worker.prompts[-1] or "The oak" in rig.worker.prompts[-1]


@pytest.mark.parametrize("requests_max", [1, 8])
async def test_a_response_that_has_not_begun_can_be_cancelled(requests_max: int, rather_slow: MockClock) -> None:
    async with gateway_client(requests_max=requests_max) as (rig, other):
        await other.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        client = await websocket_client(rig)
        await client.send(
            b"".join(frame(json.dumps(each).encode()) for each in (create(), {"type": "response.cancel"}))
        )
        before = trio.current_time()
        events = await client.events()
        assert types(events)[-1] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
        assert trio.current_time() - before < 1
        await leave_all(rig)


async def test_a_response_continues_the_one_before(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        first = await whole(client, create("first n=2", instructions="Be kind."))
        second = await whole(client, create("second n=2", previous_response_id=first["id"]))
        assert second["previous_response_id"] == first["id"]
        assert rig.worker.prompts[1] == "user\nfirst n=2\nassistant\nThe oak\nuser\nsecond n=2\nassistant\n"
        await client.say(create("third", previous_response_id=first["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"
        failed = await last_event(client, create("n=5 fail=2", previous_response_id=second["id"]))
        assert (failed["type"], failed["response"]["error"]["cause"]) == ("response.failed", "engine_lost")
        await client.say(create("again", previous_response_id=second["id"]))  # a failure evicts what it referred to
        error = (await client.event())["error"]
        assert error["code"] == "previous_response_not_found"
        assert "and forgets one that a failed request of its lane continued; send the whole" in error["message"]


async def test_an_error_in_the_middle_is_a_failed_response(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (_, client):
        await client.say(create("n=9 fail=3"))
        events = await client.events()
        last = events[-1]["response"]
        assert (events[-1]["type"], last["status"], last["output"][0]["status"]) == (
            "response.failed",
            "failed",
            "incomplete",
        )
        assert output_text(events) == last["output"][0]["content"][0]["text"] == "The oak is"
        assert last["usage"]["output_tokens"] == 3
        assert "response.completed" not in types(events)
        assert (await whole(client, create("n=1")))["status"] == "completed"


@pytest.mark.parametrize("how", ["close frame", "close", "half", "reset"])
async def test_the_responses_of_a_socket_are_aborted_when_its_client_leaves(
    how: str, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=100 s=1"))
        await client.say(create("n=100 s=1"))
        await client.events("response.output_text.delta")
        await leave(client, how)
        await at_rest(rig)
        assert (rig.worker.left, len(rig.worker.prompts)) == (1, 1)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("garbage", "code"),
    [
        (b"\xff" * 20, 1002),
        (b"\x81\x05hello", 1002),
        (frame(b"\xff\xfe"), 1007),
        (frame(b"", 0xF1), 1002),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
    ],
)
async def test_garbage_closes_a_socket_with_the_code_of_the_violation(
    garbage: bytes, code: int, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_websocket() as (rig, client):
        await client.send(garbage)
        assert await client.close_code() == code
        assert await client.closed()
        await leave_all(rig)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


async def test_a_message_far_beyond_the_limit_closes_with_1009(rather_slow: MockClock) -> None:
    async with gateway_websocket(body_bytes_max=50_000) as (rig, client):
        with trio.move_on_after(5):
            await client.say(b"x" * 3_000_000)
        assert await client.close_code() == 1009
        await leave_all(rig)


async def test_nothing_follows_a_close_frame(rather_slow: MockClock) -> None:
    async with gateway_websocket() as (rig, client):
        await client.send(frame(json.dumps(create("n=50 s=1")).encode()) + frame(b"\x03\xe8", 0x88))
        assert await client.close_code() == 1000
        assert await client.closed()
        await leave_all(rig)


async def test_a_client_that_leaves_is_noticed_while_a_long_message_waits_to_be_parsed(rather_slow: MockClock) -> None:
    """The threads that parse long messages may be busy for long; the responses of this client end all the same."""
    async with gateway_rig(worker=Worker(mute=True)) as rig:
        busy = trio.Event()

        async def run_late(function: Callable[[], Any], **_: object) -> Any:
            await busy.wait()
            return function()

        rig.gateway.runtime = evolve(rig.gateway.runtime, run_in_thread=run_late)
        for leave in ("close", "end"):
            client = await websocket_client(rig)
            await client.say(create("a prompt that takes its time"))
            await client.events("response.created")
            await client.say(create("x" * 200_000))
            await client.send(frame(b"\x03\xe8", 0x88)) if leave == "close" else await client.stream.aclose()
            await at_rest(rig)


async def test_pings_take_no_more_memory_than_a_message(rather_slow: MockClock) -> None:
    async with gateway_websocket(body_bytes_max=100_000, bodies_bytes_max=1_000_000) as (rig, client):
        for _ in range(100):
            await client.send(frame(b"x" * 125, 0x89) * 50)
            for _ in range(50):
                assert (await client.frame())[0] == 0x8A
        assert rig.gateway.memory.bodies.reserved_bytes <= 100_000
        await client.say(create("n=3"))
        assert output_text(await client.events()) == "The oak is"
        assert rig.gateway.memory.bodies.reserved_bytes == 0
        await leave_all(rig)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_bug_is_logged_whether_the_client_is_still_there_or_not(
    gone: bool, rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_websocket() as (rig, client):

        def fail(*_: object) -> None:
            if gone:
                client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.stream.socket.close()  # with a reset, of which the gateway learns when it writes
            raise ValueError("a bug")

        monkeypatch.setattr(message_reader.MessageReader, "receive", fail)
        await client.say(create("n=3"))
        if not gone:
            assert await client.close_code() == 1011
            await client.stream.aclose()
        await at_rest(rig)
    assert "a bug ended a connection" in caplog.messages
