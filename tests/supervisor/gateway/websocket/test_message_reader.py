"""Messages behind a long one of the same WebSocket: they wait in their order, up to a limit, and the socket is read on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import evolve
from trio.testing import MockClock

from tests.rig.gateway import Rig, Worker, create, frame, gateway_rig, leave_all
from tests.rig.sockets import websocket_client


@asynccontextmanager
async def reading(**limits: Any) -> AsyncIterator[tuple[Rig, Any, trio.Event]]:
    """Run a gateway whose threads parse nothing before an event, and a client with a response that runs."""
    async with gateway_rig(worker=Worker(mute=True), **limits) as rig:
        parsing = trio.Event()

        async def run_late(function: Callable[[], Any], **_: object) -> Any:
            await parsing.wait()
            return function()

        rig.gateway.runtime = evolve(rig.gateway.runtime, run_in_thread=run_late)
        client = await websocket_client(rig)
        await client.say(create("a prompt that takes its time"))
        await client.events("response.in_progress")
        await client.say(create("x" * 200_000))
        yield rig, client, parsing
        await leave_all(rig)


async def test_pings_and_cancels_behind_a_long_message_are_handled_at_once(rather_slow: MockClock) -> None:
    async with reading() as (_, client, parsing):
        for number in range(4):
            await client.say(create(f"short {number}"))
        await client.send(frame(b"still there", 0x89))
        with trio.fail_after(1):
            assert (await client.frame())[0] == 0x8A
            await client.say({"type": "response.cancel"})
            events = await client.events("response.incomplete")
        assert events[-1]["type"] == "response.incomplete"
        parsing.set()


async def test_a_drain_waits_for_a_message_that_is_being_parsed(rather_slow: MockClock) -> None:
    async with reading() as (rig, client, parsing):
        await client.say({"type": "response.cancel"})
        assert (await client.events("response.incomplete"))[-1]["type"] == "response.incomplete"
        rig.gateway.drain()
        async with trio.open_nursery() as nursery:
            answered = trio.Event()

            async def wait() -> None:
                await rig.gateway.connections.wait_idle()
                answered.set()

            nursery.start_soon(wait)
            await trio.sleep(1)
            assert not answered.is_set(), "a drain would cut what has been heard"
            parsing.set()
            with trio.fail_after(5):
                assert (await client.events("error"))[-1]["error"]["code"] == "draining"
                assert await client.close_code() == 1012
                await answered.wait()


async def test_messages_behind_a_long_one_keep_their_order(rather_slow: MockClock) -> None:
    async with reading() as (_, client, parsing):
        for lane, wrong in (("a", 5), ("b", [5] * 50_000), ("c", 6)):
            await client.say(create(wrong, stream_id=lane))
        await trio.sleep(0.1)
        parsing.set()
        with trio.fail_after(5):
            errors = [(await client.events("error"))[-1] for _ in range(3)]
        assert [each["stream_id"] for each in errors] == ["a", "b", "c"]


async def test_too_many_messages_behind_a_long_one_are_refused_in_their_lanes(rather_slow: MockClock) -> None:
    async with reading(websocket_queue_max=2) as (_, client, parsing):
        for number in range(5):
            await client.say(create(f"short {number}", stream_id=f"lane-{number}"))
        with trio.fail_after(1):
            refused = [await client.events("error") for _ in range(3)]
        assert [event[-1]["stream_id"] for event in refused] == ["lane-2", "lane-3", "lane-4"]
        assert {event[-1]["error"]["code"] for event in refused} == {"overloaded"}
        assert {event[-1]["error"]["message"] for event in refused} == {"3 messages wait to be read on this connection"}
        parsing.set()
