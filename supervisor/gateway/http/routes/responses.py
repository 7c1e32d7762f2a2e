"""The Responses API over HTTP, streamed or not; no response is stored, so none can be continued."""

from __future__ import annotations

from functools import partial

import trio

from protocol.dialects import responses
from protocol.errors import RequestError, SlowClient, UpgradeRequired
from protocol.messages.generation import Started
from protocol.messages.text import Accepted, Answered, AnswerPiece, CallPart, ChoiceEnded, Reasoning, Text
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.routes.answering import reply_whole
from supervisor.gateway.requests import RenderedReply

API = "responses"


async def upgrade(_: Exchange, __: Body) -> None:
    """Refuse a GET that is no WebSocket handshake."""
    await trio.lowlevel.checkpoint()
    raise UpgradeRequired("a GET here opens a WebSocket; to use HTTP, send a POST")


async def answer(exchange: Exchange, body: Body) -> None:
    """Answer one request; raises the `RequestError` by which it failed before its response began."""
    request = await exchange.read(partial(responses.parse_http, leave_out=exchange.gateway.leave_out_tools), body)
    if request.stream:
        await _streamed(exchange, request)
        return
    response_id, created_at = exchange.gateway.runtime.new_id(), int(exchange.gateway.runtime.now())
    record = exchange.start_record(request.model, API)
    respond = responses.to_respond(request, request_id=response_id)
    builder = responses.Completion(request, request_id=response_id, created_at=created_at)
    await reply_whole(exchange, record, respond, builder)


async def _streamed(exchange: Exchange, request: responses.CreateHttp) -> None:
    gateway = exchange.gateway
    response_id = gateway.runtime.new_id()
    events = responses.Events(request, request_id=response_id, created_at=int(gateway.runtime.now()), sse=True)
    record = exchange.start_record(request.model, API)
    ended: ChoiceEnded | None = None
    accepted = False

    def on_reply(reply: RenderedReply) -> None:
        nonlocal ended, accepted
        if isinstance(reply, ChoiceEnded):
            ended = reply
        elif not isinstance(reply, Started):  # the first piece brings the events before it
            accepted = True
            exchange.response.stream(_encode(events, reply))

    def finish(answered: Answered) -> bytes:
        # A response is complete when its choice is.
        assert ended is not None
        return b"".join(events.finish(ended, answered.usage))

    stream = gateway.streams.add(exchange.response, record)
    try:
        respond = responses.to_respond(request, request_id=response_id)
        last = await gateway.answer(respond, gateway.runner.find(request.model), record, on_reply, finish)
    except RequestError as error:
        if not exchange.response.begun:
            raise
        # Clients expect `response.created` first, also where only the head had left.
        failed = b"".join(() if accepted else events.begin()) + events.failed(error, record.usage)
        if isinstance(error, SlowClient):
            exchange.response.abort_stream(failed, error)
        else:
            # The last event reports the failure, so the body may end.
            exchange.response.finish(failed)
    else:
        # The last events repeat the text several times.
        await exchange.response.outbox.wait_room(len(last))
        exchange.response.finish(last)
    finally:
        gateway.streams.remove(stream)


def _encode(events: responses.Events, reply: Accepted | AnswerPiece) -> bytes:
    match reply:
        case Text() | Reasoning() | CallPart():
            return b"".join(events.deltas(reply))
        case Accepted():
            return b"".join(events.begin())
