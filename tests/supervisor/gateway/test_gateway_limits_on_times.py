"""Each limit on time holds to the moment: what comes just before it is served, and just at it the end comes, with a reason.

`test_limits.py` does the same for sizes, `test_limits_counts.py` for how many.
"""

from __future__ import annotations

import struct

import pytest
import trio
import trio.testing

from tests.rig.gateway import Client, Rig, Worker, at_rest, chat, create, frame, head, post, rig
from tests.rig.sockets import websocket_client, whole

JUST = 0.01


def at(when_s: float):
    """A moment, but for what floating point adds to it."""
    return pytest.approx(when_s, abs=1e-6)


async def farewell(client):
    """Read to the close frame, and return its code and its reason."""
    while True:
        kind, payload = await client.frame()
        if kind == 0x88:
            return int.from_bytes(payload[:2], "big"), payload[2:].decode()


async def drip(client: Client, data: bytes, seconds: float) -> None:
    """Send bytes one by one, so long that the client is never silent: no byte may buy time."""
    pieces = int(seconds / 0.5)
    for place in range(pieces):
        await client.send(data[place : place + 1])
        await trio.sleep(0.5)


# Until a request is there --------------------------------------------------------------------------


@pytest.mark.parametrize("served", [0, 1])
async def test_a_head(served: int, rather_slow: trio.testing.MockClock) -> None:
    async with rig(head_s=10, idle_s=75) as made:
        client = await made.client()
        for _ in range(served):
            assert (await client.ask(head())).status == 200
        await client.send(head()[:20])
        await trio.sleep(10 - JUST)
        assert (await client.ask(head()[20:])).status == 200
        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client, head(x="y" * 99), 9.9)
            while await client.more():
                pass
        assert trio.current_time() == at(before + 10)
        await at_rest(made)


async def test_whoever_has_said_half_a_head_hears_that_it_took_too_long(rather_slow: trio.testing.MockClock) -> None:
    async with rig(head_s=10) as made:
        client = await made.client()
        reply = await client.ask(head()[:-1])
        assert trio.current_time() == at(10)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "slow_client", "close")
        assert reply.error["message"] == "the head did not come within 10 s"
        assert await client.closed()


async def test_one_that_says_nothing_is_let_go_when_a_head_would_have_to_be_there(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig(head_s=10, idle_s=75) as made:
        client = await made.client()
        await trio.sleep(10 - JUST)
        assert len(made.gateway.connections) == 1
        assert await client.closed()  # nothing was asked, so nothing is answered
        assert trio.current_time() == at(10)
        await at_rest(made)


async def test_half_a_head_that_was_sent_ahead_has_as_long_as_any_other(rather_slow: trio.testing.MockClock) -> None:
    async with rig(head_s=10, idle_s=75, close_s=1) as made:
        client = await made.client()
        assert (await client.ask(head() + b"GET /heal")).status == 200
        while await client.more():
            pass
        assert trio.current_time() <= 11


async def test_an_idle_connection(rather_slow: trio.testing.MockClock) -> None:
    async with rig(idle_s=75, head_s=10) as made:
        client = await made.client()
        for _ in range(3):
            assert (await client.ask(head())).status == 200
            await trio.sleep(75 - JUST)
        assert (await client.ask(post(chat("n=9 s=20")))).status == 200  # to be answered is not to be idle
        before = trio.current_time()
        assert await client.closed()
        assert trio.current_time() == at(before + 75)
        await at_rest(made)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body(chunked: bool, rather_slow: trio.testing.MockClock) -> None:
    async with rig(body_s=30, close_s=1) as made:
        client = await made.client()
        data = post(chat("n=1"))
        if chunked:
            start, _, body = data.partition(b"\r\n\r\n")
            start = head("POST", "/v1/chat/completions", transfer_encoding="chunked")
            data = start + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        await client.send(data[:-5])
        await trio.sleep(30 - JUST)
        assert (await client.ask(data[-5:])).status == 200
        before, split = trio.current_time(), data.index(b"\r\n\r\n") + 4
        await client.send(data[:split])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client, data[split:-1], 29.9)
            reply = await client.reply()
        assert trio.current_time() == at(before + 30)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "slow_client", "close")
        assert reply.error["message"] == "the body did not come within 30 s"
        assert "retry-after" not in reply.headers
        assert len(made.worker.prompts) == 1


# Until it is answered ------------------------------------------------------------------------------


async def answer(made: Rig, door: str, said: str):
    """Ask, and return when the end came, whether it is whole, and its error."""
    if door == "socket":
        client = await websocket_client(made)
        await client.say(create(said))
        last = (await client.events())[-1]
        error = last["error"] if last["type"] == "error" else last["response"]["error"]
        if last["type"] == "error":
            assert (last["status"], last["headers"]) == (503, {"retry-after": "1"})
        return trio.current_time(), last["type"] == "response.completed", error
    client = await made.client()
    reply = await client.ask(post(chat(said, stream=door == "stream")))
    now = trio.current_time()
    if door == "stream" and reply.status == 200:
        error = reply.chunks[-1].get("error")
        assert reply.whole == (error is None) == (reply.events[-1] == "[DONE]")
        return now, reply.whole, error
    if reply.status != 200:
        assert (reply.status, reply.headers["retry-after"], reply.headers["x-should-retry"]) == (503, "1", "true")
    return now, reply.status == 200, reply.json.get("error")


def code_of(error):
    return error.get("cause", error["code"])  # of a response that has begun, OpenAI's codes say less


@pytest.mark.parametrize("door", ["whole", "stream", "socket"])
async def test_a_place_at_the_gate(door: str, rather_slow: trio.testing.MockClock) -> None:
    async with rig(requests_max=1, admit_s=5) as made, trio.open_nursery() as nursery:
        nursery.start_soon(answer, made, "whole", f"n=1 s={5 - JUST}")
        await trio.lowlevel.checkpoint()
        await made_busy(made)
        ended, whole_, _ = await answer(made, door, "n=1 s=0")
        assert (whole_, ended) == (True, at(5 - JUST))
        nursery.start_soon(answer, made, "whole", "n=1 s=5.1")
        await made_busy(made)
        before = trio.current_time()
        ended, whole_, error = await answer(made, door, "n=1 s=0")
        assert (whole_, ended) == (False, at(before + 5))
        assert (error["code"], error["message"]) == ("overloaded", "no place was free within 5 s")


async def made_busy(made: Rig) -> None:
    """Wait until somebody is inside, which takes no virtual time."""
    while not made.gateway.gate.inside:
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("door", ["whole", "stream", "socket"])
async def test_a_first_token(door: str, rather_slow: trio.testing.MockClock) -> None:
    async with rig(first_token_s=10) as made:
        ended, whole_, _ = await answer(made, door, f"n=1 s={10 - JUST}")
        assert (whole_, ended) == (True, at(10 - JUST))
        before = trio.current_time()
        ended, whole_, error = await answer(made, door, f"n=1 s={10 + JUST}")
        assert (whole_, ended) == (False, at(before + 10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", "there was no token within 10 s")
        await trio.sleep(JUST / 2)
        assert made.worker.left == 1  # before it would have begun


@pytest.mark.parametrize("door", ["whole", "stream", "socket"])
async def test_the_total_time_of_a_request(door: str, rather_slow: trio.testing.MockClock) -> None:
    async with rig(total_s=10) as made:
        ended, whole_, _ = await answer(made, door, f"n=2 s={5 - JUST}")
        assert (whole_, ended) == (True, at(10 - 2 * JUST))
        before = trio.current_time()
        ended, whole_, error = await answer(made, door, f"n=2 s={5 + JUST}")
        assert (whole_, ended) == (False, at(before + 10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", "the answer took longer than 10 s")
        await trio.sleep(JUST)
        assert made.worker.left == 1
        assert (await answer(made, door, "n=1"))[1]  # for the next one time begins anew


async def test_waiting_at_the_gate_counts_into_the_total_time(rather_slow: trio.testing.MockClock) -> None:
    async with rig(requests_max=1, admit_s=8, total_s=10) as made, trio.open_nursery() as nursery:
        nursery.start_soon(answer, made, "whole", "n=1 s=6")
        await made_busy(made)
        ended, whole_, error = await answer(made, "stream", "n=5 s=1")
        assert (whole_, ended) == (False, at(10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", "the answer took longer than 10 s")


# Of a WebSocket ------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [frame(b"", 0x89), frame(b'{"type": "response.cancel"}'), frame(b"{")])
async def test_a_websocket_on_which_nothing_is_said(said: bytes, rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_idle_s=50, close_s=1) as made:
        client = await websocket_client(made)
        for _ in range(3):
            await trio.sleep(50 - JUST)
            await client.send(said)
        before = trio.current_time()
        assert await farewell(client) == (1000, "nothing was received for 50 s")
        assert trio.current_time() == at(before + 50)


async def test_a_websocket_that_is_being_answered_is_not_idle(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_idle_s=50, first_token_s=600) as made:
        client = await websocket_client(made)
        await client.say(create("n=1 s=300"))
        assert (await client.events())[-1]["type"] == "response.completed"
        await trio.sleep(50 - JUST)
        assert (await whole(client, create("n=1 s=0")))["status"] == "completed"
        before = trio.current_time()
        assert (await farewell(client))[0] == 1000
        assert trio.current_time() == at(before + 50)


async def test_the_longest_time_of_a_websocket(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_s_max=100) as made:
        client = await websocket_client(made)
        await trio.sleep(100 - JUST)
        assert (await whole(client, create("n=1 s=0")))["status"] == "completed"
        error = await client.event()
        assert trio.current_time() == at(100)
        assert (error["type"], error["status"]) == ("error", 400)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert error["error"]["message"] == "create a new connection to continue"
        assert await farewell(client) == (1000, "the connection has reached its age limit")


async def test_what_began_before_the_longest_time_ends_whole_after_it(rather_slow: trio.testing.MockClock) -> None:
    async with rig(websocket_s_max=100) as made:
        client = await websocket_client(made)
        await trio.sleep(100 - JUST)
        await client.say(create("n=5 s=10"))
        assert (await client.events())[-1]["type"] == "response.completed"
        assert trio.current_time() == at(150 - JUST)
        assert (await client.event())["error"]["code"] == "websocket_connection_limit_reached"
        assert (await farewell(client))[0] == 1000


async def test_a_handshake_on_a_connection_that_was_idle_takes_no_time_from_the_websocket(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig(websocket_s_max=100, idle_s=75) as made:
        client = await made.client()
        assert (await client.ask(head())).status == 200
        await trio.sleep(75 - JUST)
        assert (await client.upgrade()).status == 101
        before = trio.current_time()
        assert (await client.event())["error"]["code"] == "websocket_connection_limit_reached"
        assert trio.current_time() == at(before + 100)


# Ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [False, True])
async def test_a_client_that_does_not_say_goodbye_is_waited_for_so_long_and_no_longer(
    answers: bool, rather_slow: trio.testing.MockClock
) -> None:
    async with rig(close_s=2) as made:
        client = await websocket_client(made)
        made.gateway.drain()
        assert await farewell(client) == (1012, "the server is shutting down")
        before = trio.current_time()
        if answers:
            await trio.sleep(2 - JUST)
            await client.send(frame(struct.pack(">H", 1012), 0x88))
            await client.stream.aclose()
        await at_rest(made)
        assert trio.current_time() - before == at(2 - JUST if answers else 2)


async def test_a_client_that_goes_on_after_it_was_refused_is_heard_out_so_long_and_no_longer(
    rather_slow: trio.testing.MockClock,
) -> None:
    async with rig(body_bytes_max=1000, close_s=2) as made:
        client = await made.client()
        reply = await client.ask(head("POST", "/v1/chat/completions", content_length=1001))
        assert reply.status == 413
        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client, b"x" * 100, 1.9)
            await at_rest(made)
        assert trio.current_time() == at(before + 2)


async def test_a_client_that_reads_nothing_is_dropped_as_one_that_stalls(rather_slow: trio.testing.MockClock) -> None:
    async with rig(worker=Worker(line="The oak is old. " * 50), stall_s=20, send_buffer_bytes=4096) as made:
        client = Client(await made.connect(receive_buffer=2048))
        await client.send(post(chat("n=1900", stream=True)))
        await trio.sleep(20 - JUST)
        assert made.gateway.connections
        with trio.fail_after(200):  # the kernel moves a little more of it in its own time
            await made.gateway.connections.wait_closed()
        await at_rest(made)
        assert b'espalier_clients_dropped_total{reason="stalled"} 1.0' in made.metrics.render({})
