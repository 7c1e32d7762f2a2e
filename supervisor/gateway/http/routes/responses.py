"""Responses over HTTP, streamed or not; nothing is remembered of them, so none can be continued."""

from __future__ import annotations

import trio

from actors.processor import TextReply
from protocol.dialects import responses
from protocol.errors import RequestError, SlowClient, UpgradeRequired
from protocol.messages import Started
from protocol.text_messages import Accepted, Answered, ChoiceEnded, Text
from supervisor.gateway.http.exchange import Exchange
from supervisor.gateway.http.routes.answering import reply_whole

API = "responses"


async def upgrade(_: Exchange, __: bytes) -> None:
    """Say that a GET is for WebSocket clients."""
    await trio.lowlevel.checkpoint()
    raise UpgradeRequired("a GET here opens a WebSocket; to ask by HTTP, send a POST")


async def answer(exchange: Exchange, body: bytes) -> None:
    """Answer one request; raises the `RequestError` that ended the answer before it began."""
    asked = await exchange.read(responses.parse_http, body)
    if asked.stream:
        await _streamed(exchange, asked)
        return
    ours, created_at = exchange.gateway.new_id(), int(exchange.gateway.now())
    counted = exchange.counted(asked.model, API)
    respond = responses.to_respond(asked, request_id=ours)
    gathered = responses.Completion(asked, request_id=ours, created_at=created_at)
    await reply_whole(exchange, counted, respond, gathered)


async def _streamed(exchange: Exchange, asked: responses.CreateHttp) -> None:
    gateway = exchange.gateway
    ours = gateway.new_id()
    events = responses.Events(asked, request_id=ours, created_at=int(gateway.now()), sse=True)
    counted = exchange.counted(asked.model, API)
    ended: ChoiceEnded | None = None

    def pass_on(reply: TextReply) -> None:
        nonlocal ended
        if isinstance(reply, ChoiceEnded):
            ended = reply
        else:
            exchange.stream(_told(events, reply))

    def finish(answered: Answered) -> bytes:
        assert ended is not None  # an answer is whole when its choice is
        return b"".join(events.finish(ended, answered.usage))

    try:
        respond = responses.to_respond(asked, request_id=ours)
        last = await gateway.answer(respond, gateway.runner.find(asked.model), counted, pass_on, finish)
    except RequestError as error:
        if not exchange.begun:
            raise
        failed = events.failed(error, counted.usage)
        if isinstance(error, SlowClient):
            exchange.abort_stream(failed, error)
        else:
            exchange.finish(failed)  # it says itself that the answer is not whole, so the body may end as bodies do
    else:
        await exchange.outbox.wait_room(len(last))  # they repeat the text several times
        exchange.finish(last)


def _told(events: responses.Events, reply: Accepted | Started | Text) -> bytes:
    match reply:
        case Text():
            return b"".join(events.deltas(reply))
        case Started():
            return b"".join(events.open())
        case Accepted():
            return b"".join(events.begin())
