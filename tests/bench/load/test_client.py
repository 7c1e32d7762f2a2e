"""Requests to a real socket: how each is counted, how it leaves, and what it leaves behind."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar

import pytest
import trio
from wsproto.events import CloseConnection, Ping, TextMessage

from bench.load import measure
from bench.load.client import Exchange, Pool
from bench.load.messages import Fault, Record, Target
from bench.load.plan import PlannedRequest
from bench.load.requests import parse_url
from tests.rig.scripted_server import (
    HEAD,
    Asked,
    Script,
    Scripted,
    chat_events,
    chunk,
    delta,
    event,
    nothing,
    response_end,
    saying,
    scripted,
    whole,
)


class Client:
    """Sends one request after the other as one client does."""

    opened: ClassVar[list["Client"]] = []

    def __init__(self, server: Scripted, **options: Any) -> None:
        usual: dict[str, Any] = {"url": server.url, "api": "chat", "model": "m", "timeout_s": 60.0}
        self.target = Target(**usual | options)
        self.pool = Pool(self.target, parse_url(self.target.url, self.target.api))
        Client.opened.append(self)

    async def ask(self, tokens: int = 4, number: int = 0) -> Record:
        with trio.fail_after(90):
            ask = PlannedRequest(number, "hello", tokens)
            return await Exchange(ask, self.pool, time.perf_counter).run(time.perf_counter())


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    """Leave no socket open: one that is would warn, and warnings are errors."""
    yield
    while Client.opened:
        Client.opened.pop().pool.close()


async def sent(script: Script, **options: Any) -> Record:
    """Return how one request went that was answered so."""
    async with scripted(script) as server:
        return await Client(server, **options).ask()


def fault_of(record: Record) -> Fault:
    assert record.fault is not None
    return record.fault


async def test_a_whole_answer_is_completed_and_its_connection_serves_the_next() -> None:
    async with scripted(whole) as server:
        client = Client(server, key="secret")
        first, second = await client.ask(), await client.ask()
    assert (first.fault, first.finish, first.output_tokens, first.prompt_tokens) == (None, "length", 4, 7)
    assert len(measure.stamps(first)) == 4
    assert 0 < (measure.ttft_s(first) or 0) <= first.ended_s
    assert (first.connect_s or 0) > 0
    assert (second.fault, second.connect_s) == (None, None)
    assert server.connections == 1
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


async def test_a_connection_that_ended_between_two_requests_costs_neither() -> None:
    async def once(asked: Asked) -> None:
        await whole(asked)
        await asked.stream.aclose()

    async with scripted(once) as server:
        client = Client(server)
        faults = []
        for _ in range(3):
            faults.append((await client.ask()).fault)
            await trio.testing.wait_all_tasks_blocked(0.001)
        assert (faults, server.connections) == ([None] * 3, 3)


@pytest.mark.parametrize(
    ("api", "events"),
    [
        ("completions", [event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})] * 2
         + [event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}), event("[DONE]")]),
        ("responses", [event({"type": "response.output_text.delta", "delta": "a"}, "response.output_text.delta")] * 2
         + [event(response_end("completed", 2), "response.completed")]),
    ],
)  # fmt: skip
async def test_other_apis_over_http(api: str, events: list[bytes]) -> None:
    answer = await sent(saying(HEAD, *map(chunk, events), chunk(b""), close=False), api=api, ignore_eos=True)
    assert (answer.fault, answer.finish, len(measure.stamps(answer))) == (None, "stop", 2)


async def test_an_answer_without_done_is_whole_if_its_body_ends_well() -> None:
    events = chat_events(2)[:-2]
    assert (await sent(saying(HEAD, *map(chunk, events), b"0\r\n\r\n"))).fault is None
    plain = HEAD.replace(b"transfer-encoding: chunked\r\n", b"connection: close\r\n")
    answer = await sent(saying(plain, *events))
    assert (answer.fault, answer.output_tokens) == (None, None)


@pytest.mark.parametrize("kept", range(6))
async def test_an_answer_that_stops_anywhere_before_its_end_is_truncated(kept: int) -> None:
    answer = await sent(saying(HEAD, *map(chunk, chat_events(3)[:kept])))
    assert fault_of(answer).kind == "truncated"


@pytest.mark.realtime
async def test_an_answer_that_takes_too_long_is_a_timeout_with_its_place() -> None:
    assert fault_of(await sent(nothing, timeout_s=0.05)).code == "before the first token"
    slow = await sent(saying(HEAD, chunk(event(delta("w"))), close=False), timeout_s=0.05)
    assert (fault_of(slow).kind, fault_of(slow).code) == ("timeout", "mid-stream")


# WebSocket --------------------------------------------------------------------------------


def says(*events: Mapping[Any, Any], close: int | None = None) -> Callable[[Any], Any]:
    def script(body: Mapping[str, Any]) -> list[Any]:
        found = [TextMessage(json.dumps(each)) for each in events] if body["type"] == "response.create" else []
        return [Ping(payload=b"there?"), *found, *([CloseConnection(close)] if close else [])]

    return script


DELTA = {"type": "response.output_text.delta", "delta": "a"}


async def test_responses_over_a_websocket_share_it() -> None:
    async with scripted(says({"type": "response.created"}, DELTA, DELTA, response_end("completed", 2))) as server:
        client = Client(server, api="responses-ws", ignore_eos=True)
        answers = [await client.ask() for _ in range(3)]
    assert [(each.fault, each.output_tokens, each.cached_tokens) for each in answers] == [(None, 2, 3)] * 3
    assert server.connections == 1
    assert server.bodies[0] == {
        "model": "m", "type": "response.create", "input": "hello", "max_output_tokens": 4, "store": False,
        "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_websocket_that_closes_in_mid_answer_truncates_it(at_once: bool) -> None:
    async with scripted(says(DELTA, close=1011), at_once=at_once) as server:
        answer = await Client(server, api="responses-ws").ask()
    fault = fault_of(answer)
    assert (fault.kind, fault.code, len(measure.stamps(answer))) == ("truncated", "ws close 1011", 1)


async def test_a_websocket_that_closes_after_an_answer_is_not_used_again() -> None:
    async with scripted(says(DELTA, response_end("completed"), close=1012)) as server:
        client = Client(server, api="responses-ws")
        first = await client.ask()
        await trio.testing.wait_all_tasks_blocked(0.001)  # the close is under way
        second = await client.ask()
        assert (first.fault, second.fault, server.connections) == (None, None, 2)


async def test_pools_that_share_a_limit_connect_one_after_the_other() -> None:
    async with scripted(whole) as server:
        limit = trio.Semaphore(1)
        pool = Pool(Target(url=server.url, api="chat", model="m"), parse_url(server.url, "chat"), connecting=limit)
        await limit.acquire()
        with trio.move_on_after(0.05) as waiting:
            await pool.take()
        assert (waiting.cancelled_caught, server.connections) == (True, 0)
        limit.release()
        connection, new = await pool.take()
        connection.wire.close()
        assert (new, limit.value) == (True, 1)
