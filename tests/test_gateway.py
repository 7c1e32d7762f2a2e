"""One port, two doors: what clients get, whatever they do, and what is left of them."""

from __future__ import annotations

import json
import logging
import socket
import struct

import httpx2
import pytest
import trio
import trio.testing
from openai import APIError, NotFoundError, OpenAI
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from protocol.errors import StartFailed
from supervisor.gateway import gateway
from tests.doors import SECRET, Client, Worker, at_rest, chat, create, frame, head, post, rig


@pytest.fixture
def rather_slow():
    """A clock for sockets: they are quick, but not as quick as virtual time."""
    return trio.testing.MockClock(autojump_threshold=0.002)


def types(events):
    return [event["type"] for event in events]


def said(events):
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


# HTTP ------------------------------------------------------------------------------------------


async def test_small_things_are_told(rather_slow):
    async with rig() as made:
        client = await made.client()
        health = await client.ask(head())
        assert (health.status, health.body, health.headers["x-request-id"]) == (200, b"alive\n", f"{1:032x}")
        assert (await client.ask(head(path="/ready"))).body == b"ready\n"
        models = (await client.ask(head(path="/v1/models"))).json
        assert [(model["id"], model["root"], model["max_model_len"]) for model in models["data"]] == [
            ("tiny", "tiny", 2048)
        ]
        assert (await client.ask(head(path="/v1/models/tiny?x=1"))).json == models["data"][0]
        assert (await client.ask(head(path="/v1/models/t%69ny"))).status == 200
        made.ready.append("engine a is starting")
        unready = await client.ask(head(path="/ready"))
        assert (unready.status, unready.error["code"], unready.headers["retry-after"]) == (503, "not_ready", "2")
        assert (await client.ask(head())).status == 200


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (head(path="/nope"), 404, "not_found"),
        (head(path="/v1/models/other"), 404, "model_not_found"),
        (post(chat(model="other")), 404, "model_not_found"),
        (head(path="/v1/chat/completions"), 405, "method_not_allowed"),
        (post({}, "/health"), 405, "method_not_allowed"),
        (head(path="/v1/responses"), 426, "upgrade_required"),
        (post({}, "/v1/responses"), 426, "upgrade_required"),
        (head(host="evil.example"), 403, "forbidden"),
        (head(origin="https://evil.example"), 403, "forbidden"),
        (head(origin="null"), 403, "forbidden"),
        (post(b"{"), 400, "invalid_request"),
        (post(chat(temperature=9)), 400, "invalid_request"),
        (post(chat(max_tokens=5000)), 400, "context_length_exceeded"),
        (post(chat(n=2)), 400, "unsupported_parameter"),
    ],
)
async def test_a_mistake_costs_its_answer_and_not_the_connection(data, status, code, rather_slow):
    async with rig() as made:
        client = await made.client()
        for _ in range(2):
            reply = await client.ask(data)
            assert (reply.status, reply.error["code"], reply.whole) == (status, code, True)
            assert reply.headers["x-should-retry"] == "false"
            assert reply.headers.get("allow") in ({"POST", "GET, HEAD"} if status == 405 else {None})
            assert reply.headers.get("upgrade") == ("websocket" if status == 426 else None)
        assert (await client.ask(head())).status == 200
        assert made.worker.prompts == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:80", "LOCALHOST:1"])
async def test_the_servers_own_names_are_welcome(host, rather_slow):
    async with rig() as made:
        assert (await (await made.client()).ask(head(host=host, origin="http://localhost:3000"))).status == 200


async def test_an_id_of_the_clients_own_comes_back_if_it_is_decent(rather_slow):
    async with rig() as made:
        client = await made.client()
        for given, back in [("my-id", "my-id"), ("a b", None), ("x" * 129, None), ("", None)]:
            reply = await client.ask(head(x_request_id=given))
            assert (reply.headers["x-request-id"] == given) == (back is not None)


async def test_a_head_gets_the_head_of_what_a_get_gets(rather_slow):
    async with rig() as made:
        client = await made.client()
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


async def test_an_answer_without_a_stream(rather_slow):
    async with rig(worker=Worker(cached=2)) as made:
        reply = await (await made.client()).ask(post(chat("n=4"), x_request_id="mine"))
        assert reply.json["choices"][0]["message"]["content"] == "The oak is o"
        assert reply.json["usage"]["completion_tokens"] == 4
        assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert reply.headers["x-request-id"] == "mine"
        await at_rest_with(made, 1)


async def at_rest_with(made, connections):
    await trio.testing.wait_all_tasks_blocked()
    assert (len(made.door.connections), made.door.gate.inside, made.worker.running) == (connections, 0, 0)


async def test_a_stream_keeps_the_rules_that_every_harness_needs(rather_slow):
    async with rig() as made:
        client = await made.client()
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


async def test_requests_sent_ahead_are_answered_in_order(rather_slow):
    async with rig() as made:
        client = await made.client()
        await client.send(post(chat("n=3 s=1")) + head() + post(chat("n=2", stream=True)) + head(path="/nope"))
        assert (await client.reply()).json["usage"]["completion_tokens"] == 3
        await client.send(head(path="/ready"))
        assert (await client.reply()).body == b"alive\n"
        assert (await client.reply()).text == "The oak"
        assert (await client.reply()).status == 404
        assert (await client.reply()).body == b"ready\n"


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_body_may_come_in_chunks_and_in_pieces(size, rather_slow):
    body = json.dumps(chat("n=3")).encode()
    data = head("POST", "/v1/chat/completions", transfer_encoding="chunked")
    for at in range(0, len(body), 50):
        piece = body[at : at + 50]
        data += b"%x\r\n%b\r\n" % (len(piece), piece)
    data += b"0\r\n\r\n"
    async with rig() as made:
        client = await made.client()
        for at in range(0, len(data), size):
            await client.send(data[at : at + size])
        assert (await client.reply()).status == 200


async def test_one_that_asks_first_is_told_to_go_on(rather_slow):
    body = json.dumps(chat("n=3")).encode()
    async with rig() as made:
        client = await made.client()
        await client.send(head("POST", "/v1/chat/completions", content_length=len(body), expect="100-continue"))
        assert (await client.reply()).status == 100
        await client.send(body)
        assert (await client.reply()).status == 200
        refused = await client.ask(head("POST", "/nope", content_length=5, expect="100-continue"))
        assert (refused.status, refused.headers["connection"]) == (404, "close")


async def test_too_long_a_body_is_refused_and_the_client_hears_why(rather_slow):
    async with rig(body_bytes_max=100_000) as made:
        client = await made.client()
        reply = await client.ask(post(b"x" * 2_000_000))
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "too_large", "close")
        await client.stream.aclose()
        await at_rest(made)


async def test_too_long_a_head_is_refused(rather_slow):
    async with rig(head_bytes_max=4096) as made:
        client = await made.client()
        for _ in range(20):
            await client.send(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 if _ == 0 else b"y" * 1000)
        assert (await client.reply()).status == 431
        await client.stream.aclose()
        await at_rest(made)


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
async def test_garbage_is_answered_once_and_shown_the_door(garbage, rather_slow, caplog):
    async with rig() as made:
        client = await made.client()
        assert (await client.ask(garbage)).status == 400
        await client.stream.aclose()
        await at_rest(made)
    assert not caplog.records


async def test_an_old_client_without_a_host_is_refused_and_one_with_it_served(rather_slow):
    async with rig() as made:
        client = await made.client()
        await client.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await client.until(b"\r\n")).split()[1] == b"403"
        client = await made.client()
        await client.send(b"GET /health HTTP/1.0\r\nhost: localhost\r\n\r\n")
        assert (await client.until(b"\r\n")).split()[1] == b"200"
        await client.until(b"alive\n")
        assert await client.closed()


# Leaving -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("when", ["before the first token", "mid-stream"])
async def test_leaving_is_aborting(stream, how, when, rather_slow, caplog):
    async with rig() as made:
        client = await made.client()
        await client.send(post(chat("n=100 s=1", stream=stream)))
        await trio.sleep(0.5 if when == "before the first token" else 5.5)
        assert made.worker.running == 1
        if how == "half":
            await client.stream.send_eof()
        elif how == "reset":
            client.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.stream.socket.close()
        else:
            await client.stream.aclose()
        await at_rest(made)
        assert trio.current_time() < 8
        assert made.worker.left == 1
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not records, records[0].exc_text


async def test_a_stream_that_fails_says_so_and_never_looks_whole(rather_slow):
    async with rig() as made:
        reply = await (await made.client()).ask(post(chat("n=9 fail=3", stream=True)))
        assert (reply.status, reply.whole) == (200, False)
        assert "[DONE]" not in reply.events
        assert reply.chunks[-1]["error"]["code"] == "engine_lost"
        assert all(choice["finish_reason"] is None for chunk in reply.chunks[:-1] for choice in chunk["choices"])
        early = await (await made.client()).ask(post(chat("n=9 fail=0", stream=True)))
        assert (early.status, early.error["code"], early.headers["retry-after"]) == (503, "engine_lost", "1")


async def test_a_first_token_that_does_not_come_ends_the_request(rather_slow):
    async with rig(worker=Worker(mute=True), first_token_s=30) as made:
        reply = await (await made.client()).ask(post(chat()))
        assert (reply.status, reply.error["code"]) == (503, "deadline_exceeded")
        assert 30 <= trio.current_time() < 31


async def test_an_answer_has_a_longest_time(rather_slow):
    async with rig(total_s=10) as made:
        reply = await (await made.client()).ask(post(chat("n=100 s=1", stream=True)))
        assert reply.chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert 10 <= trio.current_time() < 11


async def test_waiting_at_the_gate_counts_as_waiting_for_the_first_token(rather_slow):
    async with rig(requests_max=1, first_token_s=6, admit_s=5) as made, trio.open_nursery() as nursery:
        nursery.start_soon((await made.client()).ask, post(chat("n=4 s=1")))
        await trio.sleep(0.1)
        reply = await (await made.client()).ask(post(chat("n=5 s=3")))
        assert (reply.status, reply.error["code"]) == (503, "deadline_exceeded")
        assert 6 <= trio.current_time() < 6.5


async def test_a_full_gate_says_when_to_come_back(rather_slow):
    async with rig(requests_max=1, waiting_max=1, admit_s=3) as made, trio.open_nursery() as nursery:
        first = await made.client()
        await first.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        nursery.start_soon((await made.client()).ask, post(chat()))
        await trio.sleep(0.1)
        reply = await (await made.client()).ask(post(chat()))
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        assert trio.current_time() < 1
        await trio.sleep(4)
        assert made.door.gate.waiting == 0
        await first.stream.aclose()


# Slow clients ------------------------------------------------------------------------------------


async def test_a_head_that_does_not_come_is_not_waited_for(rather_slow):
    async with rig(head_s=10, idle_s=75) as made:
        silent, slow, kept = [await made.client() for _ in range(3)]
        assert (await kept.ask(head())).status == 200
        await slow.send(b"GET /heal")
        await trio.sleep(9)
        assert len(made.door.connections) == 3
        await kept.send(b"GET /heal")  # from now on it has as long as any other
        await slow.send(b"th")  # and another byte buys no time
        await trio.sleep(1.5)
        assert len(made.door.connections) == 1
        await trio.sleep(9)
        await at_rest(made)
        assert await silent.closed()


async def test_a_body_that_does_not_come_is_not_waited_for(rather_slow):
    async with rig(body_s=30) as made:
        client = await made.client()
        await client.send(head("POST", "/v1/chat/completions", content_length=100) + b"{")
        await trio.sleep(29)
        assert made.door.connections
        await trio.sleep(5)
        await at_rest(made)


async def test_an_idle_connection_is_let_go(rather_slow):
    async with rig(idle_s=20) as made:
        client = await made.client()
        await client.ask(head())
        await trio.sleep(19)
        assert (await client.ask(head())).status == 200
        assert await client.closed()
        assert 39 <= trio.current_time() < 40
        await at_rest(made)


LONG = {"backlog_bytes_max": 20_000, "send_buffer_bytes": 4096, "stall_s": 20, "close_s": 2}


async def unread(made):
    """A client that takes almost nothing."""
    return Client(await made.connect(receive_buffer=2048))


async def test_a_client_that_never_reads_delays_nobody_and_is_dropped_with_1013(rather_slow):
    async with rig(**LONG) as made:
        slow, quick = await unread(made), await made.client()
        assert (await slow.upgrade()).status == 101
        await slow.say(create("n=1900 s=0.004"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow_is_dropped, slow, made)
            before = trio.current_time()
            reply = await quick.ask(post(chat("n=100 s=0.01", stream=True)))
            assert reply.events[-1] == "[DONE]"
            assert trio.current_time() - before < 1.5
        assert made.worker.left == 1
        await quick.stream.aclose()
        await slow.stream.aclose()
        await at_rest(made)


async def slow_is_dropped(slow, made):
    while made.worker.left == 0:  # noqa: ASYNC110  # a fake has no event for it
        await trio.sleep(0.01)
    assert await slow.close_code() == 1013


async def test_a_stream_that_nobody_reads_ends_in_an_error_between_two_chunks(rather_slow):
    async with rig(**LONG) as made:
        slow = await unread(made)
        await slow.send(post(chat("n=1900 s=0.004", stream=True)))
        while made.worker.left == 0:  # noqa: ASYNC110
            await trio.sleep(0.01)
        reply = await slow.reply()
        assert (reply.status, reply.whole) == (200, False)
        assert reply.chunks[-1]["error"]["code"] == "slow_client"
        await at_rest(made)


async def test_a_client_that_stalls_for_ever_is_dropped(rather_slow):
    async with rig(**LONG | {"backlog_bytes_max": 10_000_000}) as made:
        slow = await unread(made)
        await slow.send(post(chat("n=1900", stream=True)))
        await trio.sleep(19)
        assert made.door.connections
        with trio.fail_after(200):  # the kernel moves a little more of it in its own time
            await made.door.wait_left()
        await at_rest(made)


async def test_answers_that_nobody_reads_stop_the_requests_sent_ahead(rather_slow):
    async with rig(**LONG) as made:
        slow = await unread(made)
        for _ in range(30):
            await slow.send(head(path="/metrics") * 4)
        await trio.sleep(60)
        await at_rest(made)


# WebSocket ---------------------------------------------------------------------------------------


async def upgraded(made, **headers):
    client = await made.client()
    assert (await client.upgrade(**headers)).status == 101
    return client


async def test_a_response_comes_in_the_order_that_clients_expect(rather_slow):
    async with rig(worker=Worker(cached=1)) as made:
        client = await upgraded(made)
        await client.say(create("n=3", stream_id="lane"))
        events = await client.events()
        assert types(events) == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * 3,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
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


async def test_an_upgrade_may_follow_requests_and_be_followed_at_once(rather_slow):
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
async def test_an_upgrade_that_is_wrong_is_refused_in_http(headers, status, rather_slow):
    async with rig() as made:
        client = await made.client()
        assert (await client.upgrade(**headers)).status == status
        await client.stream.aclose()
        await at_rest(made)


@pytest.mark.parametrize("key", ["x", "%%%", "dGhlIHNhbXBsZSBub25jZQ==" * 50])
async def test_a_strange_key_leaves_nothing_behind(key, rather_slow):
    async with rig() as made:
        client = await made.client()
        await client.upgrade(sec_websocket_key=key)
        await client.stream.aclose()
        await at_rest(made)


async def test_mistakes_on_a_socket_are_events_and_it_lives_on(rather_slow):
    async with rig() as made:
        client = await upgraded(made)
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


async def test_a_ping_is_answered_while_an_answer_streams(rather_slow):
    async with rig() as made:
        client = await upgraded(made)
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


async def test_cancelling_ends_a_response_as_incomplete_with_its_usage(rather_slow):
    async with rig() as made:
        client = await upgraded(made)
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
async def test_cancelling_ends_what_has_not_begun(requests_max, rather_slow):
    async with rig(requests_max=requests_max) as made:
        other = await made.client()
        await other.send(post(chat("n=100 s=1")))
        await trio.sleep(0.1)
        client = await upgraded(made)
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


async def test_a_response_continues_the_one_before(rather_slow):
    async with rig() as made:
        client = await upgraded(made)
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


async def test_an_error_after_the_beginning_is_a_failed_response(rather_slow):
    async with rig() as made:
        client = await upgraded(made)
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


async def test_only_so_many_responses_wait_on_one_socket(rather_slow):
    async with rig(queued_max=2) as made:
        client = await upgraded(made)
        await client.say(create("n=3 s=1"))
        await client.events("response.output_text.delta")
        for number in range(4):
            await client.say(create("n=1", stream_id=f"l{number}"))
        events = [event for _ in range(5) for event in await client.events()]
        refused = [event for event in events if event["type"] == "error"]
        assert [(event["stream_id"], event["error"]["code"]) for event in refused] == [
            ("l2", "overloaded"),
            ("l3", "overloaded"),
        ]
        assert refused[0]["headers"] == {"retry-after": "1"}
        assert types(events).count("response.completed") == 3


async def test_a_socket_has_a_longest_time(rather_slow):
    async with rig(connection_s_max=100) as made:
        client = await upgraded(made)
        await trio.sleep(99)
        await client.say(create("n=3 s=1"))
        await client.say(create("n=3 s=1"))
        await client.events()
        error = await client.event()
        assert (error["error"]["code"], error["status"]) == ("websocket_connection_limit_reached", 400)
        assert await client.close_code() == 1000
        await client.send(frame(struct.pack(">H", 1000), 0x88))
        await at_rest(made)


@pytest.mark.parametrize("how", ["close frame", "close", "half", "reset"])
async def test_leaving_a_socket_is_aborting(how, rather_slow, caplog):
    async with rig() as made:
        client = await upgraded(made)
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
    "garbage", [b"\xff" * 20, b"\x81\x05hello", frame(b"\xff\xfe"), frame(b"", 0xF1), b"GET / HTTP/1.1\r\n\r\n"]
)
async def test_garbage_on_a_socket_ends_it(garbage, rather_slow, caplog):
    async with rig() as made:
        client = await upgraded(made)
        await client.send(garbage)
        with pytest.raises(EOFError):
            await client.close_code()
        await client.stream.aclose()
        await at_rest(made)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


async def test_too_long_a_message_closes_with_1009(rather_slow):
    async with rig(body_bytes_max=50_000) as made:
        client = await upgraded(made)
        with trio.move_on_after(5):
            await client.say(b"x" * 3_000_000)
        assert await client.close_code() == 1009
        await client.stream.aclose()
        await at_rest(made)


# All of it ---------------------------------------------------------------------------------------


async def test_only_so_many_connections_each_counted_once(rather_slow):
    async with rig(connections_max=3) as made:
        sockets = [await upgraded(made) for _ in range(3)]
        reply = await (await made.client()).ask(head())
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        await sockets[0].stream.aclose()
        await trio.sleep(0.1)
        assert (await (await made.client()).ask(head())).status == 200


async def test_a_refused_client_that_is_gone_already_harms_nobody(rather_slow, caplog):
    async with rig(connections_max=1) as made:
        first = await made.client()
        await first.ask(head())
        for _ in range(30):
            client = await made.connect()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.socket.close()
        await trio.sleep(5)
        assert (await first.ask(head())).status == 200
    assert not caplog.records


async def test_a_drain_lets_everybody_finish_and_nobody_in(rather_slow):
    async with rig() as made:
        idle, fresh, streaming, whole = [await made.client() for _ in range(4)]
        await idle.ask(head())
        lane, quiet = await upgraded(made), await upgraded(made)
        await streaming.send(post(chat("n=5 s=1", stream=True)))
        await whole.send(post(chat("n=5 s=1")))
        await lane.say(create("n=5 s=1"))
        await lane.say(create("n=5 s=1", stream_id="queued"))
        await trio.sleep(2.5)
        made.door.drain()
        assert await idle.closed()
        assert await fresh.closed()
        assert await quiet.close_code() == 1012
        await quiet.send(frame(struct.pack(">H", 1012), 0x88))
        await quiet.stream.aclose()
        assert trio.current_time() < 3
        late = await (await made.client()).ask(post(chat()))
        assert (late.status, late.error["code"], late.headers["retry-after"]) == (503, "draining", "1")
        assert late.headers["connection"] == "close"
        assert (await (await made.client()).ask(head(path="/ready"))).status == 503
        assert (await (await made.client()).upgrade()).status == 503
        assert (await (await made.client()).ask(head())).status == 200
        await lane.say(create(stream_id="late"))
        events = await lane.events("response.completed")
        refused = [event for event in events if event["type"] == "error"]
        assert [(event["stream_id"], event["status"], event["headers"]) for event in refused] == [
            ("late", 503, {"retry-after": "1"})
        ]
        assert (await lane.event())["error"]["code"] == "draining"  # for the queued one
        assert await lane.close_code() == 1012
        await lane.send(frame(struct.pack(">H", 1012), 0x88))
        await lane.stream.aclose()
        reply = await streaming.reply()
        assert reply.events[-1] == "[DONE]"
        assert await streaming.closed()
        done = await whole.reply()
        assert (done.status, done.headers["connection"]) == (200, "close")
        await at_rest(made)
        assert trio.current_time() < 6


async def test_a_drain_that_takes_too_long_ends_answers_truthfully(rather_slow):
    async with rig() as made:
        streaming, lane = await made.client(), await upgraded(made)
        await streaming.send(post(chat("n=99 s=1", stream=True)))
        await lane.say(create("n=99 s=1"))
        await trio.sleep(2.5)
        made.door.drain()
        assert made.door.cut() == 2
        reply = await streaming.reply()
        assert (reply.whole, reply.chunks[-1]["error"]["code"]) == (False, "draining")
        last = (await lane.events())[-1]
        assert (last["type"], last["response"]["error"]["cause"]) == ("response.failed", "draining")
        assert await lane.close_code() == 1012
        await lane.stream.aclose()
        await at_rest(made)


async def test_a_port_in_use_is_one_sentence(rather_slow):
    async with rig() as made:
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1:{made.port}"):
            await gateway(made.door, "127.0.0.1", made.port)


async def test_metrics_tell_how_requests_ended(rather_slow):
    async with rig(requests_max=1, waiting_max=1, admit_s=0.5) as made:
        client = await made.client()
        await client.ask(post(chat("n=5 s=0.02", stream=True)))
        await client.ask(post(chat("n=5 fail=2")))
        lane = await upgraded(made)
        await lane.say(create("n=50 s=1"))
        await lane.events("response.created")
        await client.ask(post(chat()))
        await lane.say({"type": "response.cancel"})
        await lane.events()
        text = (await client.ask(head(path="/metrics"))).body.decode()
        for line in [
            'espalier_requests_total{door="chat",model="tiny",outcome="stop"} 1.0',
            'espalier_requests_total{door="chat",model="tiny",outcome="engine_lost"} 1.0',
            'espalier_requests_total{door="chat",model="tiny",outcome="overloaded"} 1.0',
            'espalier_requests_total{door="responses",model="tiny",outcome="left"} 1.0',
            'espalier_tokens_total{kind="output",model="tiny"} 7.0',
            'gen_ai_server_time_to_first_token_seconds_count{model="tiny"} 2.0',
            'gen_ai_server_time_per_output_token_seconds_count{model="tiny"} 5.0',
            'gen_ai_server_time_per_output_token_seconds_bucket{le="0.01",model="tiny"} 1.0',
        ]:
            assert line in text, (line, text)


async def test_prompts_and_answers_are_in_no_log(rather_slow, caplog):
    caplog.set_level(logging.DEBUG)
    async with rig(worker=Worker(line=f"I know {SECRET}. ")) as made:
        client, lane = await made.client(), await upgraded(made)
        for body in (chat(f"{SECRET} n=9"), chat(f"{SECRET} n=9 fail=3", stream=True), chat(SECRET, nope=SECRET)):
            await (await made.client()).ask(post(body, x_request_id="r1"))
        await client.send(post(b'{"model": "tiny", "messages": "' + SECRET.encode()))
        for event in (create(f"{SECRET} n=9"), create(f"{SECRET} n=9 fail=2"), create(SECRET, metadata=SECRET), SECRET):
            await lane.say(event)
            await lane.events()
    assert len([record for record in caplog.records if record.message == "request ended"]) == 4
    assert {"r1"} <= {getattr(record, "request_id", None) for record in caplog.records}
    assert all(SECRET not in str(vars(record)) for record in caplog.records)


async def test_a_bug_of_ours_is_an_error_of_its_request_alone(rather_slow, caplog):
    async with rig() as made:

        async def broken():
            await trio.lowlevel.checkpoint()
            raise ZeroDivisionError

        made.door.metrics_text = broken
        client = await made.client()
        reply = await client.ask(head(path="/metrics"))
        assert (reply.status, reply.error["code"]) == (500, "internal")
        assert (await client.ask(head())).status == 200
    assert "a bug failed a request" in caplog.text


# Clients that nobody here wrote --------------------------------------------------------------------


async def aside(function, *arguments):
    with trio.fail_after(20):
        await trio.to_thread.run_sync(function, *arguments)


def openai_says(url):
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    wanted = {"model": "tiny", "messages": [{"role": "user", "content": "n=30"}]}
    whole = client.chat.completions.create(**wanted)
    with client.chat.completions.create(**wanted, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input="n=30")
        deltas = []
        for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.completed":
                assert event.response.output_text == text
                break
    assert "".join(deltas) == text
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=wanted["messages"])
    failing = {"model": "tiny", "messages": [{"role": "user", "content": "n=9 fail=3"}], "stream": True}
    with pytest.raises(APIError, match="died"), client.chat.completions.create(**failing) as stream:
        list(stream)
    client.close()


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # openai calls websockets the older way
async def test_the_stock_openai_client_is_at_home():
    async with rig() as made:
        await aside(openai_says, made.url)
        await at_rest(made)


def websockets_says(port):
    with connect(f"ws://127.0.0.1:{port}/v1/responses", ping_interval=0.05, open_timeout=5) as lane:
        for _ in range(2):
            lane.send(json.dumps(create("n=40 s=0.004")))
            events = []
            while not events or events[-1]["type"] != "response.completed":
                events.append(json.loads(lane.recv(timeout=5)))
            assert len(said(events)) > 50
        lane.ping().wait(5)
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://127.0.0.1:{port}/v1/responses", origin="https://evil.example")
    assert caught.value.response.status_code == 403
    with connect(f"ws://127.0.0.1:{port}/v1/responses") as lane, pytest.raises(ConnectionClosedError) as closed:
        lane.send("x" * 5_000_000)
        lane.recv(timeout=5)
    assert closed.value.rcvd.code == 1009


async def test_the_stock_websockets_client_is_at_home():
    async with rig() as made:
        await aside(websockets_says, made.port)
        await at_rest(made)


def httpx_says(url):
    with httpx2.Client(base_url=url) as client:
        for _ in range(3):
            assert client.get("/health").text == "alive\n"
            assert client.get("/nope").status_code == 404
            assert client.post("/v1/chat/completions", json=chat("n=2")).status_code == 200
        assert client.post("/v1/chat/completions", content=b"x" * 9_000_000).status_code == 413


async def test_the_stock_http_client_is_at_home():
    async with rig() as made:
        await aside(httpx_says, made.url)
        await at_rest(made)
