"""Each limit on time, to the moment: what comes just before it is served, and at it the end comes, with its reason."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.rig.gateway import Client, Rig, at_rest, chat, create, frame, gateway_client, gateway_rig, head, post
from tests.rig.sockets import gateway_websocket, last_event, websocket_client, whole

JUST = 0.01


def at(when_s: float) -> Any:
    """A time, within the error of floating point."""
    return pytest.approx(when_s, abs=1e-6)


async def drip(client: Client, data: bytes, seconds: float) -> None:
    """Send bytes one by one for so many seconds: a client must not get more time by sending."""
    pieces = int(seconds / 0.5)
    for place in range(pieces):
        await client.send(data[place : place + 1])
        await trio.sleep(0.5)


# Until a request is there --------------------------------------------------------------------------


@pytest.mark.parametrize("served", [0, 1])
async def test_a_head_must_come_within_head_s(served: int, rather_slow: MockClock) -> None:
    async with gateway_client(head_s=10, idle_s=75) as (rig, client):
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
        await at_rest(rig)


async def test_half_a_head_gets_408_after_head_s(rather_slow: MockClock) -> None:
    async with gateway_client(head_s=10) as (_, client):
        reply = await client.ask(head()[:-1])
        assert trio.current_time() == at(10)
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "slow_client", "close")
        assert reply.error["message"] == "the head did not come within 10 s"
        assert await client.closed()


async def test_a_silent_connection_is_closed_after_head_s_without_a_response(rather_slow: MockClock) -> None:
    async with gateway_client(head_s=10, idle_s=75) as (rig, client):
        await trio.sleep(10 - JUST)
        assert len(rig.gateway.connections) == 1
        assert await client.closed()  # nothing was asked, so nothing is answered
        assert trio.current_time() == at(10)
        await at_rest(rig)


async def test_an_idle_connection_is_closed_after_idle_s(rather_slow: MockClock) -> None:
    async with gateway_client(idle_s=75, head_s=10) as (rig, client):
        for _ in range(3):
            assert (await client.ask(head())).status == 200
            await trio.sleep(75 - JUST)
        assert (await client.ask(post(chat("n=9 s=20")))).status == 200  # to be answered is not to be idle
        before = trio.current_time()
        assert await client.closed()
        assert trio.current_time() == at(before + 75)
        await at_rest(rig)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_must_come_within_body_s(chunked: bool, rather_slow: MockClock) -> None:
    async with gateway_client(body_s=30, close_s=1) as (rig, client):
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
        assert await client.closed()
        assert "retry-after" not in reply.headers
        assert len(rig.worker.prompts) == 1


# Until it is answered ------------------------------------------------------------------------------


async def answer(rig: Rig, api: str, prompt: str) -> tuple[float, Any, Any]:
    """Send a request, and return when its response ended, whether it is complete, and its error."""
    if api == "socket":
        client = await websocket_client(rig)
        last = await last_event(client, create(prompt))
        error = last["error"] if last["type"] == "error" else last["response"]["error"]
        if last["type"] == "error":
            assert (last["status"], last["headers"]) == (503, {"retry-after": "1"})
        return trio.current_time(), last["type"] == "response.completed", error
    client = await rig.client()
    reply = await client.ask(post(chat(prompt, stream=api == "stream")))
    now = trio.current_time()
    if api == "stream" and reply.status == 200:
        error = reply.chunks[-1].get("error")
        assert reply.whole == (error is None) == (reply.events[-1] == "[DONE]")
        return now, reply.whole, error
    if reply.status != 200:
        assert (reply.status, reply.headers["retry-after"], reply.headers["x-should-retry"]) == (503, "1", "true")
    return now, reply.status == 200, reply.json.get("error")


def code_of(error: dict[str, Any]) -> str:
    code: str = error.get("cause", error["code"])  # of a response that has begun, OpenAI's codes say less
    return code


@pytest.mark.parametrize("api", ["whole", "stream", "socket"])
async def test_a_request_waits_for_admission_for_admit_s(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig(requests_max=1, admit_s=5) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(answer, rig, "whole", f"n=1 s={5 - JUST}")
        await trio.lowlevel.checkpoint()
        await made_busy(rig)
        ended, whole_, _ = await answer(rig, api, "n=1 s=0")
        assert (whole_, ended) == (True, at(5 - JUST))
        nursery.start_soon(answer, rig, "whole", "n=1 s=5.1")
        await made_busy(rig)
        before = trio.current_time()
        ended, whole_, error = await answer(rig, api, "n=1 s=0")
        assert (whole_, ended) == (False, at(before + 5))
        assert (error["code"], error["message"]) == ("overloaded", "no place was free within 5 s")


async def made_busy(rig: Rig) -> None:
    """Wait until a request is admitted, which takes no virtual time."""
    while not rig.gateway.gate.inside:
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("api", ["whole", "stream", "socket"])
async def test_a_first_token_must_come_within_first_token_s(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig(first_token_s=10) as rig:
        ended, whole_, _ = await answer(rig, api, f"n=1 s={10 - JUST}")
        assert (whole_, ended) == (True, at(10 - JUST))
        before = trio.current_time()
        ended, whole_, error = await answer(rig, api, f"n=1 s={10 + JUST}")
        assert (whole_, ended) == (False, at(before + 10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", "there was no token within 10 s")
        await trio.sleep(JUST / 2)
        assert rig.worker.left == 1  # before it would have begun


@pytest.mark.parametrize("api", ["whole", "stream", "socket"])
async def test_a_request_must_end_within_total_s(api: str, rather_slow: MockClock) -> None:
    async with gateway_rig(total_s=10) as rig:
        ended, whole_, _ = await answer(rig, api, f"n=2 s={5 - JUST}")
        assert (whole_, ended) == (True, at(10 - 2 * JUST))
        before = trio.current_time()
        ended, whole_, error = await answer(rig, api, f"n=2 s={5 + JUST}")
        assert (whole_, ended) == (False, at(before + 10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", "the answer took longer than 10 s")
        await trio.sleep(JUST)
        assert rig.worker.left == 1
        assert (await answer(rig, api, "n=1"))[1]  # the next request has its own time


@pytest.mark.parametrize(
    ("limit", "prompt", "message"),
    [
        ("total_s", "n=5 s=1", "the answer took longer than 10 s"),
        ("first_token_s", "n=1 s=5", "there was no token within 10 s"),
    ],
)
async def test_waiting_for_admission_counts_into_the_time_of_a_request(
    limit: str, prompt: str, message: str, rather_slow: MockClock
) -> None:
    limits: dict[str, Any] = {"requests_max": 1, "admit_s": 8, limit: 10}
    async with gateway_rig(**limits) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(answer, rig, "whole", "n=1 s=6")
        await made_busy(rig)
        ended, whole_, error = await answer(rig, "stream", prompt)
        assert (whole_, ended) == (False, at(10))
        assert (code_of(error), error["message"]) == ("deadline_exceeded", message)


# Of a WebSocket ------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [frame(b"", 0x89), frame(b'{"type": "response.cancel"}'), frame(b"{")])
async def test_a_silent_websocket_is_closed_after_websocket_idle_s(data: bytes, rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_idle_s=50, close_s=1) as (_, client):
        for _ in range(3):
            await trio.sleep(50 - JUST)
            await client.send(data)
        before = trio.current_time()
        assert await client.close_frame() == (1000, "nothing was received for 50 s")
        assert trio.current_time() == at(before + 50)


async def test_a_websocket_that_is_being_answered_is_not_idle(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_idle_s=50, first_token_s=600) as (_, client):
        assert (await whole(client, create("n=1 s=300")))["status"] == "completed"
        await trio.sleep(50 - JUST)
        assert (await whole(client, create("n=1 s=0")))["status"] == "completed"
        before = trio.current_time()
        assert await client.close_code() == 1000
        assert trio.current_time() == at(before + 50)


async def test_a_websocket_is_closed_after_websocket_s_max(rather_slow: MockClock) -> None:
    async with gateway_websocket(websocket_s_max=100) as (_, client):
        await trio.sleep(100 - JUST)
        assert (await whole(client, create("n=1 s=0")))["status"] == "completed"
        error = await client.event()
        assert trio.current_time() == at(100)
        assert (error["type"], error["status"]) == ("error", 400)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert error["error"]["message"] == "create a new connection to continue"
        assert await client.close_frame() == (1000, "the connection has reached its age limit")


# Ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [False, True])
async def test_a_closing_handshake_is_waited_for_for_close_s(answers: bool, rather_slow: MockClock) -> None:
    async with gateway_websocket(close_s=2) as (rig, client):
        rig.gateway.drain()
        assert await client.close_frame() == (1012, "the server is shutting down")
        before = trio.current_time()
        if answers:
            await trio.sleep(2 - JUST)
            await client.send(frame(struct.pack(">H", 1012), 0x88))
            await client.stream.aclose()
        await at_rest(rig)
        assert trio.current_time() - before == at(2 - JUST if answers else 2)


async def test_a_refused_client_that_goes_on_sending_is_read_for_close_s(rather_slow: MockClock) -> None:
    async with gateway_client(body_bytes_max=1000, close_s=2) as (rig, client):
        reply = await client.ask(head("POST", "/v1/chat/completions", content_length=1001))
        assert reply.status == 413
        before = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip, client, b"x" * 100, 1.9)
            await at_rest(rig)
        assert trio.current_time() == at(before + 2)
