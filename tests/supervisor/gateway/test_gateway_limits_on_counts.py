"""Each limit on counts: so many are served, one more waits or is refused, and one that leaves makes room."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.rig.gateway import Client, Reply, Worker, chat, create, gateway_rig, head, leave_all, post
from tests.rig.keys import as_, require_keys
from tests.rig.sockets import collected, gateway_websocket, types, websocket_client, whole


def refused(reply: Reply, status: int, code: str, message: str) -> None:
    """Check the status, the error and the retry headers of a refusal."""
    assert (reply.status, reply.error["code"]) == (status, code)
    assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("1", "true")
    assert reply.error["message"] == message


def overloaded(event: dict[str, Any], message: str, lane: str | int | None = None) -> None:
    """Check the error and the retry header of a refusal, as an event."""
    assert (event["type"], event["status"], event["error"]["code"]) == ("error", 503, "overloaded")
    assert event["headers"] == {"retry-after": "1"}
    assert event["error"]["message"] == message
    assert event.get("stream_id") == lane


# Connections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("websocket", [False, True])
async def test_connections_beyond_connections_max_are_refused(
    most: int, websocket: bool, rather_slow: MockClock
) -> None:
    async with gateway_rig(connections_max=most) as rig:
        clients = [await (websocket_client(rig) if websocket else rig.client()) for _ in range(most)]
        for client in clients:
            if websocket:
                assert (await whole(client, create("n=1")))["status"] == "completed"
            else:
                assert (await client.ask(post(chat("n=1")))).status == 200
        late = await rig.client()
        reply = await late.reply()
        refused(reply, 503, "overloaded", f"{most} clients are connected")
        assert reply.headers["connection"] == "close"
        assert await late.closed()
        assert len(rig.gateway.connections) == most
        await clients[0].stream.aclose()
        await trio.sleep(0.1)
        assert (await (await rig.client()).ask(head())).status == 200


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_connections_beyond_key_connections_max_are_refused(most: int, rather_slow: MockClock) -> None:
    async with gateway_rig(key_connections_max=most) as rig:
        require_keys(rig)
        message = f"the key 'alice' has {most} connections, as many as it may"
        clients = [await rig.client() for _ in range(most)]
        for client in clients[1:]:
            assert (await client.ask(post(chat("n=1"), **as_("alice")))).status == 200
        assert (await clients[0].upgrade(**as_("alice"))).status == 101
        for late in (await rig.client(), await rig.client()):
            refused(await late.ask(post(chat(), **as_("alice"))), 429, "concurrency_limit_exceeded", message)
            assert (
                await late.ask(post(chat(), **as_("bob")))
            ).status == 200  # and now it is Bob's, who may have as many
            await late.stream.aclose()
            await trio.sleep(0.1)
        late = await rig.client()
        refused(await late.upgrade(**as_("alice")), 429, "concurrency_limit_exceeded", message)
        for client in clients[1:]:
            assert (await client.ask(post(chat("n=1"), **as_("alice")))).status == 200
        assert (await whole(clients[0], create("n=1")))["status"] == "completed"
        await clients[-1].stream.aclose()
        await trio.sleep(0.1)
        assert (await (await rig.client()).upgrade(**as_("alice"))).status == 101


# Requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("websocket", [False, True])
@pytest.mark.parametrize(("inside", "waiting"), [(1, 1), (2, 1), (2, 3)])
async def test_requests_beyond_requests_max_wait_and_beyond_waiting_max_are_refused(
    inside: int, waiting: int, websocket: bool, rather_slow: MockClock
) -> None:
    """Those up to the limit run at once; as many as may wait do so and are served; one more is refused at once."""
    async with gateway_rig(requests_max=inside, waiting_max=waiting, admit_s=60) as rig, trio.open_nursery() as nursery:
        ends = []

        async def ask(client: Client) -> None:
            reply = await client.ask(post(chat("n=5 s=2")))
            ends.append((trio.current_time(), reply.status))

        for place in range(inside + waiting):
            nursery.start_soon(ask, await rig.client())
            await trio.sleep(0.1)
            assert rig.worker.running == rig.gateway.gate.inside == min(place + 1, inside)
            assert rig.gateway.gate.waiting == max(0, place + 1 - inside)
        before, message = trio.current_time(), f"{inside} requests are being served and {waiting} wait"
        late = await (websocket_client(rig) if websocket else rig.client())
        if websocket:
            await late.say(create("n=1", stream_id="a"))
            overloaded(await late.event(), message, "a")
        else:
            refused(await late.ask(post(chat("n=1"))), 503, "overloaded", message)
        assert trio.current_time() == before
        while rig.gateway.gate.waiting == waiting:  # noqa: ASYNC110  # a gate has no event for one that comes in
            await trio.sleep(0.1)
        if websocket:  # now there is room for one that waits
            assert (await whole(late, create("n=1")))["status"] == "completed"
        else:
            assert (await late.ask(post(chat("n=1")))).status == 200
    assert [status for _, status in ends] == [200] * (inside + waiting)
    assert 10 <= ends[inside - 1][0] < 12
    assert (rig.gateway.gate.inside, rig.gateway.gate.waiting) == (0, 0)


async def test_a_request_that_left_the_queue_makes_room(rather_slow: MockClock) -> None:
    async with gateway_rig(requests_max=1, waiting_max=1, admit_s=60) as rig:
        inside, waiting, late = [await rig.client() for _ in range(3)]
        await inside.send(post(chat("n=5 s=1")))
        await trio.sleep(0.1)
        await waiting.send(post(chat()))
        await trio.sleep(0.1)
        assert (await late.ask(post(chat()))).status == 503
        await waiting.stream.aclose()
        await trio.sleep(0.1)
        assert (await late.ask(post(chat()))).status == 200
        assert (await inside.reply()).status == 200


# Of one WebSocket ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("state", ["running", "waiting", "remembered"])
async def test_lanes_beyond_websocket_lanes_max_are_refused(state: str, most: int, rather_slow: MockClock) -> None:
    async with gateway_rig(websocket_lanes_max=most, websocket_running_max=1 if state == "waiting" else 16) as rig:
        client, other = await websocket_client(rig), await websocket_client(rig)
        if state == "waiting":
            await client.say(create("n=9 s=1"))
        for lane in range(most):
            await client.say(create("n=1" if state == "remembered" else "n=2 s=1", stream_id=f"l{lane}"))
            if state == "remembered":
                assert (await client.events())[-1]["type"] == "response.completed"
        await client.say(create("n=1", stream_id="late"))
        refusal = (await client.events("error"))[-1]
        assert (refusal["status"], refusal["stream_id"], refusal.get("headers")) == (400, "late", None)
        assert (refusal["error"]["code"], refusal["error"]["param"]) == ("websocket_stream_limit_reached", "stream_id")
        assert refusal["error"]["message"] == f"this connection has {most} lanes, as many as it may"
        if state != "remembered":
            lanes = await collected(client, most + (state == "waiting"))
            assert {events[-1]["type"] for events in lanes.values()} == {"response.completed"}
        for name in (None, *(f"l{lane}" for lane in range(most))):  # those that are there are all of use
            assert (await whole(client, create("n=1", stream_id=name)))["status"] == "completed"
        assert (await whole(other, create("n=1", stream_id="late")))["status"] == "completed"  # it has its own


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_responses_beyond_websocket_running_max_wait_and_beyond_websocket_queue_max_are_refused(
    most: int, rather_slow: MockClock
) -> None:
    async with gateway_rig(websocket_running_max=most, websocket_queue_max=2) as rig:
        client, other = await websocket_client(rig), await websocket_client(rig)
        for lane in range(most + 2):
            await client.say(create("n=2 s=1", stream_id=f"l{lane}"))
            await trio.sleep(0.01)
            assert rig.worker.running == min(lane + 1, most)
        for name in (None, "late", "l0"):
            await client.say(create("n=1", stream_id=name))
            overloaded((await client.events("error"))[-1], "2 responses wait for their turn on this connection", name)
        assert (await whole(other, create("n=1")))["status"] == "completed"  # it has places of its own
        lanes = await collected(client, most + 2)
        assert {events[-1]["type"] for events in lanes.values()} == {"response.completed"}
        assert len(rig.worker.prompts) == most + 3
        for lane in range(most + 2):  # and now there is room again
            await client.say(create("n=1", stream_id=f"l{lane}"))
        assert len(await collected(client, most + 2)) == most + 2


async def test_a_request_that_waits_for_its_own_lane_counts_as_waiting(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_running_max=8, websocket_queue_max=2) as (_, client):
        for _ in range(4):
            await client.say(create("n=2 s=1", stream_id="a"))
        overloaded((await client.events("error"))[-1], "2 responses wait for their turn on this connection", "a")
        await client.say(create("n=1", stream_id="b"))  # another lane is free, so it does not wait
        lanes = await collected(client, 4)
        assert types(lanes["a"]).count("response.completed") == 3
        assert lanes["b"][-1]["type"] == "response.completed"


async def test_a_waiting_request_that_is_cancelled_makes_room(rather_slow: MockClock) -> None:
    async with gateway_rig(worker=Worker(mute=True), websocket_running_max=1, websocket_queue_max=1) as rig:
        client = await websocket_client(rig)
        for lane in "abc":
            await client.say(create(stream_id=lane))
        overloaded((await client.events("error"))[-1], "1 responses wait for their turn on this connection", "c")
        await client.say({"type": "response.cancel", "stream_id": "b"})
        assert (await client.events())[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
        for lane in "cd":
            await client.say(create(stream_id=lane))
        overloaded((await client.events("error"))[-1], "1 responses wait for their turn on this connection", "d")
        await leave_all(rig)
