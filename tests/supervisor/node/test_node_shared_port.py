"""A node whose gateway shares its port ends: whoever had connected is served, however slow it is, within the limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from supervisor.cluster.directory import Directory
from supervisor.gateway.gateway import LAST_REQUEST_S
from supervisor.gateway.http.connection import ON_ITS_WAY_S
from supervisor.node.node import Node
from supervisor.processes.process import GracePeriods
from tests.rig.gateway import Client, Rig, chat, create, gateway_rig, handshake, leave_all, post

DRAIN_S = 30.0
LATE_S = 4.0  # later than any fixed time that a busy machine could be granted
JUST = 0.1
ENDS_S = 3.0  # when an answer of 30 tokens has ended
LONG_ANSWER = post(chat("n=30 s=0.1", stream=True))


@asynccontextmanager
async def ending_node(
    drain_s: float = DRAIN_S, **fields: Any
) -> AsyncIterator[tuple[Rig, Callable[[], Awaitable[float]]]]:
    """Yield a gateway that shares its port, and a function that drains its node and returns how long that took."""
    async with gateway_rig(shares_port=True, **fields) as rig, trio.open_nursery() as nursery:
        assembly: Any = SimpleNamespace(directory=Directory("front-0"), gateway=rig.gateway, links=None)
        runtime: Any = SimpleNamespace(grace=GracePeriods())
        unused: Any = None
        node = Node(unused, assembly, runtime, unused, lambda: drain_s, nursery=nursery)

        async def drained() -> float:
            began = trio.current_time()
            with node._tree:  # noqa: SLF001  # what the end of the drain cancels
                node.drain("the test drains")
                await trio.sleep_forever()
            return trio.current_time() - began

        yield rig, drained
        await leave_all(rig)


async def late(client: Client, first: bytes, rest: bytes) -> tuple[int, bool, str]:
    """Send the first part of a request at once and the rest late; return the status and whether all came."""
    if first:
        await client.send(first)
    await trio.sleep(LATE_S)
    reply = await client.ask(rest)
    return reply.status, reply.whole, reply.headers["connection"]


@pytest.mark.parametrize("sent", [0, 1, 40, -3])
async def test_a_request_that_comes_late_over_a_connection_that_has_come_is_answered(
    sent: int, rather_slow: MockClock
) -> None:
    async with ending_node() as (rig, drained), trio.open_nursery() as nursery:
        client, request, replies = await rig.client(), post(chat("n=3")), list[tuple[int, bool, str]]()
        part = len(request) + sent if sent < 0 else sent

        async def ask() -> None:
            replies.append(await late(client, request[:part], request[part:]))
            await client.stream.aclose()

        nursery.start_soon(ask)
        assert LATE_S <= await drained() < DRAIN_S
        assert replies == [(200, True, "close")]


@pytest.mark.parametrize("upgrades_late", [False, True])
async def test_a_websocket_whose_first_request_comes_late_is_answered(
    upgrades_late: bool, rather_slow: MockClock
) -> None:
    async with ending_node() as (rig, drained), trio.open_nursery() as nursery:
        client, events = await rig.client(), list[str]()

        async def ask() -> None:
            if upgrades_late:
                await trio.sleep(LATE_S)
            assert (await client.upgrade()).status == 101
            await trio.sleep(LATE_S)
            await client.say(create("n=3"))
            events.append((await client.events())[-1]["type"])
            assert await client.close_code() == 1012
            await client.stream.aclose()

        nursery.start_soon(ask)
        await drained()
        assert events == ["response.completed"]


async def test_requests_that_wait_for_admission_are_answered(rather_slow: MockClock) -> None:
    async with ending_node(requests_max=1) as (rig, drained), trio.open_nursery() as nursery:
        clients, replies = [await rig.client() for _ in range(3)], list[int]()

        async def ask(client: Client) -> None:
            replies.append((await client.ask(post(chat("n=10 s=0.1")))).status)
            await client.stream.aclose()

        for client in clients:
            nursery.start_soon(ask, client)
        await drained()
        assert replies == [200] * 3


async def test_clients_that_send_nothing_delay_the_end_by_the_time_for_a_head_at_most(rather_slow: MockClock) -> None:
    async with ending_node(head_s=3.0) as (rig, drained):
        silent, lane, idle = [await rig.client() for _ in range(3)]
        assert (await lane.upgrade()).status == 101
        assert (await idle.ask(post(chat()))).whole
        assert LAST_REQUEST_S < await drained() < 3.0 + 2.5  # two of them for the close of the WebSocket
        assert await silent.closed()
        assert await lane.close_code() == 1012
        assert await idle.closed()


async def test_sessions_that_have_asked_and_idle_connections_delay_the_end_no_longer(rather_slow: MockClock) -> None:
    async with ending_node() as (rig, drained), trio.open_nursery() as nursery:
        lane, idle = [await rig.client() for _ in range(2)]
        await lane.send(handshake())
        assert (await lane.reply()).status == 101
        await lane.say(create())
        assert (await lane.events())[-1]["type"] == "response.completed"
        assert (await idle.ask(post(chat()))).whole

        async def leave() -> None:
            assert await lane.close_code() == 1012
            await lane.stream.aclose()

        nursery.start_soon(leave)
        assert LAST_REQUEST_S <= await drained() < LAST_REQUEST_S + ON_ITS_WAY_S + JUST
        assert await idle.closed()


async def test_a_client_that_has_long_been_idle_may_send_one_more_request(rather_slow: MockClock) -> None:
    async with ending_node() as (rig, drained), trio.open_nursery() as nursery:
        client, replies = await rig.client(), list[object]()
        assert (await client.ask(post(chat("n=3")))).status == 200
        await trio.sleep(LATE_S)

        async def ask() -> None:
            await trio.sleep(LAST_REQUEST_S - JUST)
            reply = await client.ask(post(chat("n=3")))
            replies.append((reply.status, reply.whole, reply.headers["connection"]))
            await client.stream.aclose()

        nursery.start_soon(ask)
        await drained()
        assert replies == [(200, True, "close")]


async def test_what_has_not_come_by_the_end_of_the_drain_is_refused(rather_slow: MockClock) -> None:
    async with ending_node(drain_s=2.0) as (rig, drained), trio.open_nursery() as nursery:
        client, errors = await rig.client(), list[str]()

        async def ask() -> None:
            await client.send(post(chat())[:40])
            reply = await client.reply()
            errors.append(reply.error["code"])
            await client.stream.aclose()

        nursery.start_soon(ask)
        assert 2.0 <= await drained() < 3.0
        assert errors == ["draining"]


# Answers that began before the drain: their heads did not say that the connection ends ------------


SOON_S = (
    ENDS_S - LAST_REQUEST_S / 2
)  # an answer that began so long before the drain ends while idle clients are waited for


@pytest.mark.parametrize(
    ("before_s", "pause_s", "part"),
    [
        (0.5, 0.0, 0),
        (0.5, LAST_REQUEST_S - JUST, 0),
        (SOON_S, LAST_REQUEST_S - JUST, 0),
        (0.5, 0.0, 40),
        (0.5, 0.0, -3),
    ],
)
async def test_a_client_whose_answer_began_before_the_drain_may_send_one_more_request(
    before_s: float, pause_s: float, part: int, rather_slow: MockClock
) -> None:
    async with ending_node() as (rig, drained), trio.open_nursery() as nursery:
        client, last, replies = await rig.client(), post(chat("n=3")), list[object]()
        await client.send(LONG_ANSWER)
        await trio.sleep(before_s)

        async def ask() -> None:
            first = await client.reply()
            await trio.sleep(pause_s)
            if part:
                replies.append(
                    (first.whole, "connection" in first.headers, *await late(client, last[:part], last[part:]))
                )
            else:
                reply = await client.ask(last)
                replies.append(
                    (first.whole, "connection" in first.headers, reply.status, reply.whole, reply.headers["connection"])
                )
            assert await client.closed()
            await client.stream.aclose()

        nursery.start_soon(ask)
        await drained()
        assert replies == [(True, False, 200, True, "close")]
