"""One lane of a WebSocket: its events, its mistakes and its ends."""

from __future__ import annotations

import json
import logging
import socket
import struct
from typing import Any

import pytest
import trio
import trio.testing

from protocol.dialects import request_body, responses
from supervisor.gateway.origins import Origins
from supervisor.gateway.websocket import message_reader
from supervisor.gateway.websocket.replayed_stream import ReplayedStream
from tests.rig.dialects import response_event_types
from tests.rig.gateway import Worker, at_rest, chat, create, frame, head, post, rig
from tests.rig.sockets import said, types, websocket_client


async def test_a_response_comes_in_the_order_that_clients_expect(rather_slow: trio.testing.MockClock) -> None:
    async with rig(worker=Worker(cached=1)) as made:
        client = await websocket_client(made)
        await client.say(create("n=3", stream_id="lane"))
        events = await client.events()
        assert types(events) == response_event_types(3)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert {event["stream_id"] for event in events} == {"lane"}
        assert said(events) == "The oak is"
        usage = events[-1]["response"]["usage"]
        assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (3, 1)
        await client.say(create("n=9", max_output_tokens=2))
        last = (await client.events())[-1]
        assert (last["type"], last["response"]["incomplete_details"]) == (
            "response.incomplete",
            {"reason": "max_output_tokens"},
        )


async def test_an_upgrade_may_follow_requests_and_be_followed_at_once(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        assert (await client.ask(head())).status == 200
        assert (await client.ask(post(chat("n=2")))).status == 200
        lines = {"upgrade": "WebSocket", "connection": "keep-alive, Upgrade", "sec_websocket_version": 13}
        lines |= {"sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==", "x_request_id": "mine"}
        request = head("GET", "/v1/responses?model=tiny", **lines)
        hello = {"type": "response.create", "input": "n=2"}
        await client.send(request[:50])
        await client.send(request[50:] + frame(json.dumps(hello).encode()))
        reply = await client.reply()
        assert (reply.status, reply.headers["x-request-id"]) == (101, "mine")
        events = await client.events()
        assert said(events) == "The oak", events


async def test_what_comes_behind_a_handshake_is_read_in_pieces(
    rather_slow: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, given = ReplayedStream.receive_some, []

    async def noted(self, max_bytes=None) -> bytes | bytearray:
        data = await plain(self, max_bytes)
        given.append((self.accepted.is_set(), len(data), max_bytes))
        return data

    monkeypatch.setattr(ReplayedStream, "receive_some", noted)
    async with rig() as made:
        client = await made.client()
        lines = {"upgrade": "websocket", "connection": "Upgrade", "sec_websocket_version": 13}
        request = head("GET", "/v1/responses", sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==", **lines)
        await client.send(request + frame(b"", 0x8A) * 9_000)  # pongs, of which each is looked at
        assert (await client.reply()).status == 101
        await client.say(create("n=3"))
        assert said(await client.events()) == "The oak is"
    pongs = [(size, most) for accepted, size, most in given if accepted]
    assert sum(size for size, _ in pongs) > 50_000
    assert all(size <= most for size, most in pongs)


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
async def test_an_upgrade_that_is_wrong_is_refused_in_http(
    headers: dict[str, Any], status: int, rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        client = await made.client()
        assert (await client.upgrade(**headers)).status == status
        await client.stream.aclose()
        await at_rest(made)


@pytest.mark.parametrize("twice", ["connection: close", "sec-websocket-key: eA==", "sec-websocket-version: 8"])
async def test_a_handshake_that_can_be_read_in_two_ways_is_refused(
    twice: str, rather_slow: trio.testing.MockClock
) -> None:
    async with rig() as made:
        client = await made.client()
        lines = {
            "upgrade": "websocket",
            "connection": "Upgrade",
            "sec_websocket_version": 13,
            "sec_websocket_key": "eA==",
        }
        await client.send(head("GET", "/v1/responses", **lines)[:-2] + twice.encode() + b"\r\n\r\n")
        assert (await client.reply()).status == 400
        await client.stream.aclose()
        await at_rest(made)


@pytest.mark.parametrize(
    "line",
    ["sec-websocket-protocol: \xff", "sec-websocket-extensions: a\xe9", "host: xn--a"],
)
async def test_a_handshake_with_what_the_library_cannot_read_is_accepted(
    line: str, rather_slow: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever knows another name of the host, or speaks another extension, is a client all the same."""
    async with rig() as made:
        made.gateway.origins = Origins(frozenset({"*"}))
        client = await made.client()
        lines = {"upgrade": "websocket", "connection": "Upgrade"}
        lines |= {"sec_websocket_version": 13, "sec_websocket_key": "eA=="}
        if line.startswith("host: "):
            await client.send(head("GET", "/v1/responses", host=line[6:], **lines))
        else:
            await client.send(head("GET", "/v1/responses", **lines)[:-2] + line.encode("latin-1") + b"\r\n\r\n")
        assert (await client.reply()).status == 101
        await client.stream.aclose()
        await at_rest(made)
    assert "a bug ended a connection" not in caplog.messages


@pytest.mark.parametrize("key", ["x", "%%%", "dGhlIHNhbXBsZSBub25jZQ==" * 50])
async def test_a_strange_key_leaves_nothing_behind(key: str, rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await made.client()
        await client.upgrade(sec_websocket_key=key)
        await client.stream.aclose()
        await at_rest(made)


async def test_mistakes_on_a_socket_are_events_and_it_lives_on(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
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
        assert said(await client.events()) == "The oak"


async def test_a_ping_is_answered_while_an_answer_streams(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=50 s=1"))
        await client.events("response.output_text.delta")
        await client.send(frame(b"are you there", 0x89))
        before = trio.current_time()
        kinds = []
        while (got := await client.frame())[0] != 0x8A:
            kinds.append(got)
        assert got[1] == b"are you there"
        assert trio.current_time() - before <= 1.1
        await client.stream.aclose()
        await at_rest(made)


async def test_cancelling_ends_a_response_as_incomplete_with_its_usage(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=50 s=1", stream_id="a"))
        started = await client.events("response.output_text.delta")
        response_id = started[0]["response"]["id"]
        await client.say({"type": "response.cancel", "response_id": "resp_other"})
        await client.say({"type": "response.cancel", "stream_id": "b"})
        await client.events("response.output_text.delta")
        await client.say({"type": "response.cancel", "response_id": response_id})
        last = (await client.events())[-1]["response"]
        assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "cancelled"})
        assert last["usage"]["output_tokens"] == len(last["output"][0]["content"][0]["text"].split()) == 2
        assert last["output"][0]["status"] == "incomplete"
        await trio.testing.wait_all_tasks_blocked()
        assert (made.worker.running, made.worker.left) == (0, 1)
        await client.say({"type": "response.cancel"})  # nobody's mistake
        await client.say(create("n=1", previous_response_id=response_id))
        assert (await client.events())[-1]["type"] == "response.completed"
        assert "The oak<|im_end|>" in made.worker.prompts[-1] or "The oak" in made.worker.prompts[-1]


@pytest.mark.parametrize("requests_max", [1, 8])
async def test_cancelling_ends_what_has_not_begun(requests_max: int, rather_slow: trio.testing.MockClock) -> None:
    async with rig(requests_max=requests_max) as made:
        other = await made.client()
        await other.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        client = await websocket_client(made)
        await client.send(
            b"".join(frame(json.dumps(each).encode()) for each in (create(), {"type": "response.cancel"}))
        )
        before = trio.current_time()
        events = await client.events()
        assert types(events)[-1] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
        assert trio.current_time() - before < 1
        await other.stream.aclose()
        await client.stream.aclose()
        await at_rest(made)


async def test_a_response_continues_the_one_before(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("first n=2", instructions="Be kind."))
        first = (await client.events())[-1]["response"]
        await client.say(create("second n=2", previous_response_id=first["id"]))
        second = (await client.events())[-1]["response"]
        assert second["previous_response_id"] == first["id"]
        assert made.worker.prompts[1] == "user\nfirst n=2\nassistant\nThe oak\nuser\nsecond n=2\nassistant\n"
        await client.say(create("third", previous_response_id=first["id"]))
        assert (await client.event())["error"]["code"] == "previous_response_not_found"
        await client.say(create("n=5 fail=2", previous_response_id=second["id"]))
        failed = (await client.events())[-1]
        assert (failed["type"], failed["response"]["error"]["cause"]) == ("response.failed", "engine_lost")
        await client.say(create("again", previous_response_id=second["id"]))  # a failure evicts what it referred to
        assert (await client.event())["error"]["code"] == "previous_response_not_found"


async def test_an_error_after_the_beginning_is_a_failed_response(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=9 fail=3"))
        events = await client.events()
        last = events[-1]["response"]
        assert (events[-1]["type"], last["status"], last["output"][0]["status"]) == (
            "response.failed",
            "failed",
            "incomplete",
        )
        assert said(events) == last["output"][0]["content"][0]["text"] == "The oak is"
        assert last["usage"]["output_tokens"] == 3
        assert "response.completed" not in types(events)
        await client.say(create("n=1"))
        assert (await client.events())[-1]["type"] == "response.completed"


async def test_a_socket_has_a_longest_time(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_s_max=100) as made:
        client = await websocket_client(made)
        await trio.sleep(99)
        await client.say(create("n=3 s=1"))
        await client.say(create("n=3 s=1"))
        assert (await client.events())[-1]["type"] == "response.completed"
        assert (await client.event())["error"]["code"] == "websocket_connection_limit_reached"  # for the one that waits
        error = await client.event()
        assert (error["error"]["code"], error["status"]) == ("websocket_connection_limit_reached", 400)
        assert await client.close_code() == 1000
        await client.send(frame(struct.pack(">H", 1000), 0x88))
        await at_rest(made)


@pytest.mark.parametrize("how", ["close frame", "close", "half", "reset"])
async def test_leaving_a_socket_is_aborting(
    how: str, rather_slow: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.say(create("n=100 s=1"))
        await client.say(create("n=100 s=1"))
        await client.events("response.output_text.delta")
        if how == "close frame":
            await client.send(frame(struct.pack(">H", 1000), 0x88))
        elif how == "half":
            await client.stream.send_eof()
        elif how == "reset":
            client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.stream.socket.close()
        else:
            await client.stream.aclose()
        await at_rest(made)
        assert (made.worker.left, len(made.worker.prompts)) == (1, 1)
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
async def test_garbage_on_a_socket_ends_it_and_the_client_hears_why(
    garbage: bytes, code: int, rather_slow: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.send(garbage)
        assert await client.close_code() == code
        assert await client.closed()
        await client.stream.aclose()
        await at_rest(made)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


async def test_too_long_a_message_closes_with_1009(rather_slow: trio.testing.MockClock) -> None:
    async with rig(body_bytes_max=50_000) as made:
        client = await websocket_client(made)
        with trio.move_on_after(5):
            await client.say(b"x" * 3_000_000)
        assert await client.close_code() == 1009
        await client.stream.aclose()
        await at_rest(made)


async def test_nothing_follows_a_close_frame(rather_slow: trio.testing.MockClock) -> None:
    async with rig() as made:
        client = await websocket_client(made)
        await client.send(frame(json.dumps(create("n=50 s=1")).encode()) + frame(b"\x03\xe8", 0x88))
        assert await client.close_code() == 1000
        assert await client.closed()
        await client.stream.aclose()
        await at_rest(made)


async def test_an_event_that_cannot_be_read_is_decoded_once(
    rather_slow: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def counting(text) -> dict[str, Any]:
        decoded.append(text)
        return request_body.decode(text)

    for module in (message_reader, responses.requests):
        monkeypatch.setattr(module, "decode", counting)
    async with rig() as made:
        client = await websocket_client(made)
        await client.say({"type": "response.create", "model": "tiny", "input": 5, "stream_id": "lane"})
        [event] = await client.events()
        assert (event["type"], event["stream_id"], event["error"]["param"]) == ("error", "lane", "input")
        assert len(decoded) == 1


async def test_whoever_leaves_is_noticed_while_a_long_message_waits_to_be_read(
    rather_slow: trio.testing.MockClock,
) -> None:
    """Threads that read long messages may be busy for long; what runs for this client ends all the same."""
    async with rig(worker=Worker(mute=True)) as made:
        busy = trio.Event()

        async def aside(function, **_):
            await busy.wait()
            return function()

        made.gateway.run_in_thread = aside
        for leave in ("close", "end"):
            client = await websocket_client(made)
            await client.say(create("a prompt that takes its time"))
            await client.events("response.created")
            await client.say(create("x" * 200_000))
            await client.send(frame(b"\x03\xe8", 0x88)) if leave == "close" else await client.stream.aclose()
            await at_rest(made)


async def test_pings_without_end_take_no_more_memory_than_a_message(rather_slow: trio.testing.MockClock) -> None:
    async with rig(body_bytes_max=100_000, bodies_bytes_max=1_000_000) as made:
        client = await websocket_client(made)
        for _ in range(100):
            await client.send(frame(b"x" * 125, 0x89) * 50)
            for _ in range(50):
                assert (await client.frame())[0] == 0x8A
        assert made.gateway.bodies.reserved_bytes <= 100_000
        await client.say(create("n=3"))
        assert said(await client.events()) == "The oak is"
        assert made.gateway.bodies.reserved_bytes == 0
        await client.stream.aclose()
        await at_rest(made)
