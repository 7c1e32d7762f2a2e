"""A request for which no memory is left gets a retryable error, and no other request is affected."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock
from wsproto.connection import Connection

from supervisor.gateway.http.syntax import HttpSyntax
from tests.rig.gateway import chat, create, gateway_rig, head, leave_all, post
from tests.rig.sockets import gateway_websocket, websocket_client, whole

FAMINE = b"famine"  # for data that contains this, memory runs out


def starve(
    monkeypatch: pytest.MonkeyPatch, where: type[HttpSyntax | Connection] | ModuleType, name: str, at: int
) -> None:
    """Make a function raise `MemoryError` if its argument at a place contains `FAMINE`."""
    plain = getattr(where, name)

    def starved(*given: Any) -> Any:
        if FAMINE in (given[at] or b""):
            raise MemoryError
        return plain(*given)

    monkeypatch.setattr(where, name, starved)


@pytest.mark.parametrize("when", ["read", "decoded"])
async def test_a_body_for_which_no_memory_is_left_gets_a_retryable_error(
    when: str, rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    if when == "read":
        starve(monkeypatch, HttpSyntax, "receive_data", 1)
    else:
        starve(monkeypatch, msgspec.json, "decode", 0)
    async with gateway_rig() as rig:
        beside, client = await rig.client(), await rig.client()
        await beside.send(post(chat("n=9 s=1", stream=True)))
        await trio.sleep(1.5)
        begin, _, rest = post(chat("famine")).partition(b"\r\n\r\n")
        await client.send(begin + b"\r\n\r\n")
        await trio.sleep(0.1)
        await client.send(rest)
        with trio.fail_after(5):
            reply = await client.reply()
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        assert reply.error["message"] == "the server has no memory left for this request"
        await client.stream.send_eof()
        assert await client.closed()
        streamed = await beside.reply()
        assert (streamed.whole, streamed.events[-1]) == (True, "[DONE]")
        assert (await beside.ask(head())).status == 200
        await leave_all(rig)


async def test_a_message_for_which_no_memory_is_left_is_refused_alone(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch, msgspec.json, "decode", 0)
    async with gateway_websocket() as (rig, client):
        await client.say(create("n=5 s=1", stream_id="a"))
        await client.events("response.created")
        await client.say(create("famine", stream_id="b"))
        events = await client.events("error")
        assert (events[-1]["error"]["code"], events[-1]["status"]) == ("overloaded", 503)
        assert (await client.events())[-1]["type"] == "response.completed", "of the lane beside it"
        assert (await whole(client, create("n=2")))["status"] == "completed"
        await leave_all(rig)


async def test_a_websocket_for_which_no_memory_is_left_is_closed_with_1013(
    rather_slow: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starve(monkeypatch, Connection, "receive_data", 1)
    async with gateway_rig() as rig:
        beside, client = await websocket_client(rig), await websocket_client(rig)
        await beside.say(create("n=5 s=1"))
        await client.say(create("famine"))
        with trio.fail_after(5):
            assert await client.close_code() == 1013
        assert (await beside.events())[-1]["type"] == "response.completed"
        assert caplog.messages == ["no memory was left for a request"]
        await leave_all(rig)
