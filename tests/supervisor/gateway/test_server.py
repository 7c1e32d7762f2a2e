"""Clients that leave, are slow or come too late, the drain, and what is logged and counted."""

from __future__ import annotations

import logging
import socket
import struct
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from trio.lowlevel import Task
from trio.testing import MockClock

from actors.kit.calls import Address, mailbox
from actors.processor import TextReply, TextRequest, TextResult
from protocol.errors import StartFailed
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.server import serve
from supervisor.gateway.turns import LoopTurns
from tests.rig.gateway import (
    SECRET,
    Client,
    Rig,
    Worker,
    at_rest,
    chat,
    create,
    frame,
    gateway_client,
    gateway_rig,
    head,
    leave,
    leave_all,
    post,
)
from tests.rig.sockets import websocket_client

# Leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "half", "reset"])
@pytest.mark.parametrize("when", ["before the first token", "mid-stream"])
async def test_the_request_of_a_client_that_leaves_is_aborted(
    stream: bool, how: str, when: str, rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_client() as (rig, client):
        await client.send(post(chat("n=100 s=1", stream=stream)))
        await trio.sleep(0.5 if when == "before the first token" else 5.5)
        assert rig.worker.running == 1
        await leave(client, how)
        await at_rest(rig)
        assert trio.current_time() < 8
        assert rig.worker.left == 1
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not records, records[0].exc_text


async def test_a_stream_that_fails_ends_with_an_error_and_without_its_last_chunk(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        reply = await (await rig.client()).ask(post(chat("n=9 fail=3", stream=True)))
        assert (reply.status, reply.whole) == (200, False)
        assert "[DONE]" not in reply.events
        assert reply.chunks[-1]["error"]["code"] == "engine_lost"
        assert all(choice["finish_reason"] is None for chunk in reply.chunks[:-1] for choice in chunk["choices"])
        early = await (await rig.client()).ask(post(chat("n=9 fail=0", stream=True)))
        assert (early.status, early.error["code"], early.headers["retry-after"]) == (503, "engine_lost", "1")


# Slow clients -------------------------------------------------------------------------------------


LONG: dict[str, Any] = {"backlog_bytes_max": 20_000, "send_buffer_bytes": 4096, "stall_s": 20, "close_s": 2}


async def test_a_client_that_does_not_read_is_dropped_with_1013_and_delays_no_other(rather_slow: MockClock) -> None:
    async with gateway_rig(**LONG) as rig:
        slow, quick = await rig.client(2048), await rig.client()
        assert (await slow.upgrade()).status == 101
        await slow.say(create("n=1900 s=0.004"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow_is_dropped, slow, rig)
            before = trio.current_time()
            reply = await quick.ask(post(chat("n=100 s=0.01", stream=True)))
            assert reply.events[-1] == "[DONE]"
            assert trio.current_time() - before < 1.5
        assert rig.worker.left == 1
        await leave_all(rig)


async def slow_is_dropped(slow: Client, rig: Rig) -> None:
    await rig.worker.wait_left()
    assert await slow.close_code() == 1013


async def test_a_stream_that_is_not_read_ends_in_an_error_between_two_chunks(rather_slow: MockClock) -> None:
    async with gateway_client(2048, **LONG) as (rig, slow):
        await slow.send(post(chat("n=1900 s=0.004", stream=True)))
        await rig.worker.wait_left()
        reply = await slow.reply()
        assert (reply.status, reply.whole) == (200, False)
        assert reply.chunks[-1]["error"]["code"] == "slow_client"
        await at_rest(rig)


async def test_dropping_a_response_leaves_the_complete_one_before_it_intact(rather_slow: MockClock) -> None:
    """Both wait in one backlog, and only the second may be dropped."""
    async with gateway_client(2048, **LONG | {"backlog_bytes_max": 100_000}) as (rig, slow):
        await slow.send(post(chat("n=120", stream=True)) + post(chat("n=1900 s=0.004", stream=True)))
        await rig.worker.wait_left()
        first = await slow.reply()
        assert (first.whole, first.events[-1]) == (True, "[DONE]")
        with suppress(EOFError):
            assert not (await slow.reply()).whole
        await at_rest(rig)


async def test_responses_that_are_not_read_stop_pipelined_requests(rather_slow: MockClock) -> None:
    async with gateway_client(2048, **LONG) as (rig, slow):
        for _ in range(30):
            await slow.send(head(path="/metrics") * 4)
        await trio.sleep(60)
        await at_rest(rig)


# All of it ----------------------------------------------------------------------------------------


class Passes(trio.abc.Instrument):
    """Counts the steps of tasks in each pass of the event loop."""

    def __init__(self) -> None:
        self.steps = [0]

    def before_task_step(self, task: Task) -> None:
        self.steps[-1] += 1

    def before_io_wait(self, timeout: float) -> None:
        self.steps.append(0)


async def test_many_connections_that_end_at_once_do_not_end_in_one_turn(rather_slow: MockClock) -> None:
    crowd, passes = 120, Passes()
    async with gateway_rig() as rig:
        streams = [await rig.connect() for _ in range(crowd)]
        while len(rig.gateway.connections) < crowd:  # noqa: ASYNC110  # nothing tells of it
            await trio.sleep(0.01)
        trio.lowlevel.add_instrument(passes)
        for stream in streams:
            stream.socket.close()
        await at_rest(rig)
        trio.lowlevel.remove_instrument(passes)
    assert sum(steps > crowd // 2 for steps in passes.steps) <= 2  # all wake at once, and stand in line


async def test_clients_that_come_while_nothing_is_accepted_are_answered(rather_slow: MockClock) -> None:
    async with gateway_client() as (rig, honest):
        crowd = [socket.create_connection(("127.0.0.1", rig.port), timeout=0.5) for _ in range(300)]  # in one turn
        assert (await honest.ask(head())).status == 200
        for each in crowd:
            client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(each)))
            assert (await client.ask(head())).status == 200
            await client.stream.aclose()


async def test_every_client_of_a_crowd_beyond_the_limit_is_told_when_to_come_again(rather_slow: MockClock) -> None:
    async with gateway_client(connections_max=1) as (rig, first):
        await first.ask(head())
        crowd = [socket.create_connection(("127.0.0.1", rig.port), timeout=0.5) for _ in range(300)]  # in one turn
        for each in crowd:
            each.sendall(post(chat("n=1")))
        for each in crowd:
            client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(each)))
            reply = await client.reply()
            assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
            assert await client.closed()
            await client.stream.aclose()
        assert (await first.ask(head())).status == 200


async def test_a_drain_finishes_what_runs_and_refuses_what_is_new(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        idle, fresh, streaming, whole = [await rig.client() for _ in range(4)]
        await idle.ask(head())
        lane, quiet = await websocket_client(rig), await websocket_client(rig)
        await streaming.send(post(chat("n=5 s=1", stream=True)))
        await whole.send(post(chat("n=5 s=1")))
        await lane.say(create("n=5 s=1"))
        await lane.say(create("n=5 s=1"))
        await trio.sleep(2.5)
        rig.gateway.drain()
        assert await idle.closed()
        assert await fresh.closed()
        assert await quiet.close_code() == 1012
        await quiet.send(frame(struct.pack(">H", 1012), 0x88))
        await quiet.stream.aclose()
        assert trio.current_time() < 3
        late = await (await rig.client()).ask(post(chat()))
        assert (late.status, late.error["code"], late.headers["retry-after"]) == (503, "draining", "1")
        assert late.headers["connection"] == "close"
        assert (await (await rig.client()).ask(head(path="/ready"))).status == 503
        assert (await (await rig.client()).upgrade()).status == 503
        assert (await (await rig.client()).ask(head())).status == 200
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
        await at_rest(rig)
        assert trio.current_time() < 6


async def test_a_drain_that_takes_too_long_ends_responses_with_an_error(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        streaming, lane = await rig.client(), await websocket_client(rig)
        await streaming.send(post(chat("n=99 s=1", stream=True)))
        await lane.say(create("n=99 s=1"))
        await trio.sleep(2.5)
        rig.gateway.drain()
        assert rig.gateway.abort() == 2
        reply = await streaming.reply()
        assert (reply.whole, reply.chunks[-1]["error"]["code"]) == (False, "draining")
        last = (await lane.events())[-1]
        assert (last["type"], last["response"]["error"]["cause"]) == ("response.failed", "draining")
        assert await lane.close_code() == 1012
        await leave_all(rig)


async def test_part_of_a_request_is_refused_at_once_though_its_wait_had_not_begun_when_the_drain_took_too_long(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_client(head_s=10, body_s=30) as (rig, client):

        async def drain_and_abort(_: LoopTurns) -> None:
            rig.gateway.drain()
            rig.gateway.abort()
            await trio.lowlevel.checkpoint()

        monkeypatch.setattr(LoopTurns, "wait_read", drain_and_abort)
        await client.send(head() * 5 + head()[:20])
        for _ in range(5):
            assert (await client.reply()).status == 200
        reply = await client.reply()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "draining", "close")
        assert trio.current_time() < 1


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "oak"}), ("/detokenize", {"tokens": [1]})])
async def test_a_drain_that_takes_too_long_ends_a_conversion_with_an_error(
    path: str, body: dict[str, str | list[int]], rather_slow: MockClock
) -> None:
    async with gateway_rig(first_token_s=60) as rig:
        asked: Address[TextRequest, TextReply, TextResult]
        asked, _ = mailbox(8)  # nothing answers
        rig.gateway.runner.served = {"tiny": evolve(rig.gateway.runner.find("tiny"), ask=asked)}
        late = await (await rig.client()).ask(post(body, path))
        assert (late.status, late.error["code"]) == (503, "deadline_exceeded")
        assert 60 <= trio.current_time() < 60.5
        client = await rig.client()
        await client.send(post(body, path))
        await trio.sleep(1)
        assert rig.gateway.statistics().requests == 1
        rig.gateway.drain()
        assert rig.gateway.abort() == 1
        reply = await client.reply()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "draining", "close")
        assert rig.gateway.statistics().requests == 0
        await leave_all(rig)


async def test_a_port_in_use_is_reported_in_one_sentence(rather_slow: MockClock) -> None:
    async with gateway_rig() as rig:
        with pytest.raises(StartFailed, match=f"cannot listen on 127.0.0.1:{rig.port}"):
            await serve(rig.gateway, ROUTES, "127.0.0.1", rig.port)


async def test_metrics_count_requests_by_outcome(rather_slow: MockClock) -> None:
    async with gateway_client(requests_max=1, waiting_max=1, admit_s=0.5) as (rig, client):
        await client.ask(post(chat("n=5 s=0.02", stream=True)))
        await client.ask(post(chat("n=5 fail=2")))
        lane = await websocket_client(rig)
        await lane.say(create("n=50 s=1"))
        await lane.events("response.created")
        await client.ask(post(chat()))
        await lane.say({"type": "response.cancel"})
        await lane.events()
        text = (await client.ask(head(path="/metrics"))).body.decode()
        for line in [
            'espalier_requests_total{api="chat",model="tiny",outcome="stop"} 1.0',
            'espalier_requests_total{api="chat",model="tiny",outcome="engine_lost"} 1.0',
            'espalier_requests_total{api="chat",model="tiny",outcome="overloaded"} 1.0',
            'espalier_requests_total{api="responses",model="tiny",outcome="left"} 1.0',
            'espalier_tokens_total{kind="output",model="tiny"} 7.0',
            'gen_ai_server_time_to_first_token_seconds_count{model="tiny"} 2.0',
            'gen_ai_server_time_per_output_token_seconds_count{model="tiny"} 5.0',
            'gen_ai_server_time_per_output_token_seconds_bucket{le="0.01",model="tiny"} 1.0',
        ]:
            assert line in text, (line, text)


async def test_prompts_and_answers_are_in_no_log(rather_slow: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway_rig(worker=Worker(line=f"I know {SECRET}. ")) as rig:
        client, lane = await rig.client(), await websocket_client(rig)
        for body in (chat(f"{SECRET} n=9"), chat(f"{SECRET} n=9 fail=3", stream=True), chat(SECRET, nope=SECRET)):
            await (await rig.client()).ask(post(body, x_request_id="r1"))
        await client.send(post(b'{"model": "tiny", "messages": "' + SECRET.encode()))
        for event in (create(f"{SECRET} n=9"), create(f"{SECRET} n=9 fail=2"), create(SECRET, metadata=SECRET), SECRET):
            await lane.say(event)
            await lane.events()
    assert len([record for record in caplog.records if record.message == "request ended"]) == 4
    assert {"r1"} <= {getattr(record, "request_id", None) for record in caplog.records}
    assert all(SECRET not in str(vars(record)) for record in caplog.records)


async def test_a_bug_in_a_handler_fails_its_request_alone(
    rather_slow: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_rig() as rig:

        async def broken() -> bytes:
            await trio.lowlevel.checkpoint()
            raise ZeroDivisionError

        rig.gateway.probes = evolve(rig.gateway.probes, metrics_text=broken)
        client = await rig.client()
        reply = await client.ask(head(path="/metrics"))
        assert (reply.status, reply.error["code"]) == (500, "internal")
        assert (await client.ask(head())).status == 200
    assert "a bug failed a request" in caplog.text


# A port that several gateways share -----------------------------------------------------------------


async def test_a_gateway_that_leaves_its_port_answers_one_request_of_each_client_that_has_come(
    rather_slow: MockClock,
) -> None:
    async with gateway_rig(shares_port=True) as rig:
        idle, used, new, streaming, lane = [await rig.client() for _ in range(5)]
        assert (await idle.ask(post(chat()))).whole
        assert (await used.ask(post(chat()))).whole
        assert (await lane.upgrade()).status == 101
        await streaming.send(post(chat("n=20 s=0.1", stream=True)))
        waiting = [socket.create_connection(("127.0.0.1", rig.port)) for _ in range(5)]
        rig.gateway.port.leave()  # in the turn in which they came: none has been accepted
        queued = [Client(trio.SocketStream(trio.socket.from_stdlib_socket(each))) for each in waiting]
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OSError, match="refused"):
            await rig.client()
        for client in (used, new, *queued):
            reply = await client.ask(post(chat("n=3")))
            assert (reply.status, reply.whole, reply.headers["connection"]) == (200, True, "close")
            assert await client.closed()
        await lane.say(create("n=3"))
        assert (await lane.events())[-1]["type"] == "response.completed"
        assert (await streaming.reply()).whole
        assert await streaming.closed()
        rig.gateway.drain()
        assert await lane.close_code() == 1012
        assert await idle.closed()
        for client in queued:
            await client.stream.aclose()
        await leave_all(rig)


async def test_a_drain_of_a_shared_port_waits_for_the_first_request_of_each_client_that_had_come(
    rather_slow: MockClock,
) -> None:
    async with gateway_rig(shares_port=True, head_s=60.0) as rig, trio.open_nursery() as nursery:
        slow, lane, leaver, old = [await rig.client() for _ in range(4)]
        assert (await old.upgrade()).status == 101
        await old.say(create("n=1"))
        assert (await old.events())[-1]["type"] == "response.completed"
        connected = socket.create_connection(("127.0.0.1", rig.port))
        late = Client(trio.SocketStream(trio.socket.from_stdlib_socket(connected)))
        rig.gateway.port.leave()
        done = trio.Event()

        async def wait() -> None:
            await rig.gateway.wait_last_requests()
            done.set()

        async def is_over() -> bool:
            await trio.sleep(5)
            return done.is_set()

        nursery.start_soon(wait)
        assert not await is_over()
        assert (await slow.ask(post(chat("n=3")))).whole
        assert (await late.ask(post("no JSON"))).status == 400, "a request that is refused is one, too"
        assert (await lane.upgrade()).status == 101
        assert not await is_over()
        await leaver.stream.aclose()
        assert not await is_over(), "a handshake is no request"
        await lane.say(create("n=3"))
        assert (await lane.events())[-1]["type"] == "response.completed"
        assert await is_over()
        await late.stream.aclose()


async def test_a_drain_of_a_shared_port_admits_the_requests_that_wait(rather_slow: MockClock) -> None:
    for shares_port, status in ((True, 200), (False, 503)):
        async with gateway_rig(shares_port=shares_port, requests_max=1) as rig:
            running, waiting = [await rig.client() for _ in range(2)]
            await running.send(post(chat("n=20 s=0.1")))
            await trio.sleep(0.5)
            await waiting.send(post(chat("n=3")))
            await trio.sleep(0.5)
            assert rig.gateway.statistics().waiting == 1
            rig.gateway.drain()
            assert (await waiting.reply()).status == status
            assert (await running.reply()).whole


async def test_a_gateway_that_has_left_its_port_is_not_ready(rather_slow: MockClock) -> None:
    async with gateway_client(shares_port=True) as (rig, client):
        rig.gateway.port.leave()
        reply = await client.ask(head(path="/ready"))
        assert (reply.status, reply.error["code"]) == (503, "draining")


async def test_a_gateway_whose_child_is_started_again_after_it_has_left_does_not_listen(rather_slow: MockClock) -> None:
    async with gateway_rig(shares_port=True) as rig:
        rig.gateway.port.leave()
        async with trio.open_nursery() as nursery:
            port = await nursery.start(serve, rig.gateway, ROUTES, "127.0.0.1", 0)
            with pytest.raises(OSError, match="failed"):
                await trio.open_tcp_stream("127.0.0.1", port)
            nursery.cancel_scope.cancel()


async def test_a_gateway_that_shares_its_port_listens_once_it_can_serve(rather_slow: MockClock) -> None:
    async with gateway_rig(shares_port=True) as rig, trio.open_nursery() as nursery:
        rig.ready.append("engine a is starting")
        ready = trio.Event()
        rig.gateway.probes = evolve(rig.gateway.probes, wait_ready=ready.wait)
        rig.gateway.port.listens = False  # the rig's own listener has no part in this
        port = await nursery.start(serve, rig.gateway, ROUTES, "127.0.0.1", 0)
        with pytest.raises(OSError, match="failed"):
            await trio.open_tcp_stream("127.0.0.1", port)
        rig.ready.clear()
        assert rig.gateway.gate_state().unready == "it does not listen yet"
        ready.set()
        assert not rig.gateway.port.listens
        await rig.gateway.port.wait_listening()
        assert rig.gateway.why_unready() is None
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        assert (await client.ask(post(chat()))).status == 200
        await client.stream.aclose()
        nursery.cancel_scope.cancel()
