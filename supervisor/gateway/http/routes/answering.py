"""What all routes do that answer with a model's words: in one piece, or in server-sent events as they come."""

from __future__ import annotations

from math import inf

import trio

from actors.processor import TextReply
from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.errors import RequestError, SlowClient
from protocol.messages import Started
from protocol.text_messages import Accepted, ChoiceEnded, Respond, Text
from supervisor.gateway.http.exchange import JSON, Exchange
from supervisor.gateway.requests import RequestRecord, ServedModel


async def reply_whole(exchange: Exchange, counted: RequestRecord, respond: Respond, gathered: AnswerBuilder) -> None:
    """Answer when everything is there; raises the `RequestError` that ended the answer."""
    counted.held = exchange.answer_held
    served = _served(exchange, counted)
    body = await exchange.gateway.answer(respond, served, counted, gathered.add, gathered.finish)
    await exchange.reply_in_pieces(200, [JSON], body.size, body.pieces())


async def reply_streamed(exchange: Exchange, counted: RequestRecord, respond: Respond, chunks: ChoiceChunks) -> None:
    """Answer as the text comes; raises the `RequestError` that ended the answer before it began."""
    try:
        if respond.echo:
            await _at_the_clients_pace(exchange, counted, respond, chunks)
        else:
            await _at_once(exchange, counted, respond, chunks)
    except RequestError as error:
        if not exchange.begun:
            raise
        exchange.abort_stream(chunks.failed(error), error)


async def _at_once(exchange: Exchange, counted: RequestRecord, respond: Respond, chunks: ChoiceChunks) -> None:
    """Write every event in the turn in which it comes: a client that reads slower than an engine speaks is dropped."""

    def pass_on(reply: TextReply) -> None:
        if events := _events(reply, chunks):
            exchange.stream(events)

    last = await exchange.gateway.answer(respond, _served(exchange, counted), counted, pass_on, chunks.finish)
    exchange.finish(last)


async def _at_the_clients_pace(
    exchange: Exchange, counted: RequestRecord, respond: Respond, chunks: ChoiceChunks
) -> None:
    """Write each event once the client has read most of those before it.

    An answer that repeats its prompt is long at once, for each of its choices, and nobody reads megabytes in a turn.
    What waits is accounted as an answer in one piece, and as what it is where that is more: an event is longer than its
    token.
    """
    counted.held = held = exchange.answer_held
    served, failed, waiting_bytes = _served(exchange, counted), list[Exception](), 0
    send, receive = trio.open_memory_channel[bytes](inf)  # at most what `held` accounts

    def pass_on(reply: TextReply) -> None:
        nonlocal waiting_bytes
        if events := _events(reply, chunks):
            held.grow(max(0, waiting_bytes + len(events) - held.size_bytes))
            waiting_bytes += len(events)
            send.send_nowait(events)

    async def write() -> None:
        nonlocal waiting_bytes
        try:
            async for events in receive:
                await exchange.outbox.wait_room(len(events))
                exchange.stream(events)
                waiting_bytes -= len(events)
        except (SlowClient, trio.BrokenResourceError) as error:
            failed.append(error)
            nursery.cancel_scope.cancel(reason="the client is gone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        try:
            last = await exchange.gateway.answer(respond, served, counted, pass_on, chunks.finish)
        except RequestError as error:
            failed.append(error)
            nursery.cancel_scope.cancel(reason="the answer has failed")
        send.close()
    if failed:
        raise failed[0]
    exchange.finish(last)


def _events(reply: TextReply, chunks: ChoiceChunks) -> bytes:
    match reply:
        case Text():
            return chunks.text(reply)
        case ChoiceEnded():
            return chunks.choice_ended(reply)
        case Accepted() | Started():
            return b""


def _served(exchange: Exchange, counted: RequestRecord) -> ServedModel:
    return exchange.gateway.runner.find(counted.model)
