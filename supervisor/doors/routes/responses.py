"""Responses over HTTP, streamed or not; nothing is remembered of them, so none can be continued."""

from __future__ import annotations

from functools import partial

import trio

from actors.processor import TextReply
from protocol.dialects import responses
from protocol.errors import RequestError, SlowClient, UpgradeRequired
from protocol.messages import Accepted, ChoiceEnded, Started, Text
from supervisor.doors.exchange import Exchange
from supervisor.doors.routes.answering import in_one_piece

DOOR = "responses"


async def upgrade(_: Exchange, __: bytes) -> None:
    """Say that a GET is for WebSocket clients."""
    await trio.lowlevel.checkpoint()
    raise UpgradeRequired("a GET here opens a WebSocket; to ask by HTTP, send a POST")


async def answer(exchange: Exchange, body: bytes) -> None:
    """Answer one request; raises the `RequestError` that ended the answer before it began."""
    asked = responses.parse_http(body)
    if asked.stream:
        await _streamed(exchange, asked)
        return
    ours, created_at = exchange.door.new_id(), int(exchange.door.now())
    counted = exchange.counted(asked.model, DOOR)
    respond = responses.to_respond(asked, request_id=ours)
    completion = partial(responses.completion, asked, request_id=ours, created_at=created_at)
    await in_one_piece(exchange, counted, respond, completion)


async def _streamed(exchange: Exchange, asked: responses.CreateHttp) -> None:
    door = exchange.door
    ours = door.new_id()
    events = responses.Events(asked, request_id=ours, created_at=int(door.now()), sse=True)
    counted = exchange.counted(asked.model, DOOR)
    ended: ChoiceEnded | None = None

    def pass_on(reply: TextReply) -> None:
        nonlocal ended
        match reply:
            case Text():
                exchange.stream(events.delta(reply))
            case Started():
                exchange.stream(b"".join(events.open()))
            case Accepted():
                exchange.stream(b"".join(events.begin()))
            case ChoiceEnded():
                ended = reply

    try:
        respond = responses.to_respond(asked, request_id=ours)
        answered = await door.answer(respond, door.asking.find(asked.model), counted, pass_on)
    except RequestError as error:
        if not exchange.begun:
            raise
        failed = events.failed(error, counted.usage)
        if isinstance(error, SlowClient):
            exchange.cut(failed, error)
        else:
            exchange.finish(failed)  # it says itself that the answer is not whole, so the body may end as bodies do
    else:
        assert ended is not None  # an answer is whole when its choice is
        exchange.finish(b"".join(events.finish(ended, answered.usage)))
