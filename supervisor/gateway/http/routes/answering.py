"""Responses with a model's text, for several APIs: in one piece, or as server-sent events.

An event is written in the turn in which its text comes, and no task runs for it. Echoed prompts are the exception: they
are long from the start, and are written at the pace at which the client reads. A stream without anything to send is
looked after by `open_streams`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import trio

from protocol.dialects.answer_builder import AnswerBuilder
from protocol.dialects.choices import ChoiceChunks
from protocol.errors import RequestError, SlowClient
from protocol.messages.generation import Started
from protocol.messages.text import Accepted, CallPart, ChoiceEnded, Reasoning, Respond, Text
from supervisor.gateway.http.exchange import Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.request_record import RequestRecord
from supervisor.gateway.requests import RenderedReply, ServedModel

encode = msgspec.json.Encoder().encode


async def reply_whole(exchange: Exchange, record: RequestRecord, respond: Respond, builder: AnswerBuilder) -> None:
    """Write the response once it is complete; raises the `RequestError` that ended it."""
    record.memory = exchange.response.memory
    served = _served(exchange, record)
    body = await exchange.gateway.answer(respond, served, record, builder.add, builder.finish)
    await exchange.response.reply_in_pieces(200, [JSON], body.size, body.pieces())


async def reply_streamed(exchange: Exchange, record: RequestRecord, respond: Respond, chunks: ChoiceChunks) -> None:
    """Write the response as its text comes; raises the `RequestError` by which it failed before it began."""
    streams = exchange.gateway.streams
    stream = streams.add(exchange.response, record)
    try:
        if respond.echo:
            await _stream_as_read(exchange, record, respond, chunks)
        else:
            await _stream_at_once(exchange, record, respond, chunks)
    except RequestError as error:
        if not exchange.response.begun:
            raise
        exchange.response.abort_stream(chunks.failed(error), error)
    finally:
        streams.remove(stream)


async def _stream_at_once(exchange: Exchange, record: RequestRecord, respond: Respond, chunks: ChoiceChunks) -> None:
    """Write every event in the turn of its arrival; a client that reads more slowly is dropped in the end."""

    def on_reply(reply: RenderedReply) -> None:
        if events := _events(reply, chunks):
            exchange.response.stream(events)

    on_token = _token_writer(exchange, chunks, on_reply)
    last = await exchange.gateway.answer(respond, _served(exchange, record), record, on_reply, chunks.finish, on_token)
    exchange.response.finish(last)


def _token_writer(exchange: Exchange, chunks: ChoiceChunks, on_reply: Callable[[Text], None]) -> Callable[[Text], None]:
    """Return a function that writes the event of a plain token as `on_reply` does.

    It runs for each token, with cold caches: so it reads little, and calls little.
    """
    put, head, tail, size = exchange.response.outbox.put, b"", b"", 0

    def write_token(text: Text) -> None:
        nonlocal head, tail, size
        if size:
            encoded = encode(text.text)
            put(b"%x\r\n%b%b%b\r\n" % (size + len(encoded), head, encoded, tail))
            return
        on_reply(text)
        if exchange.response.chunked and (around := chunks.around_text()) is not None:
            head, tail = around
            size = len(head) + len(tail)

    return write_token


async def _stream_as_read(exchange: Exchange, record: RequestRecord, respond: Respond, chunks: ChoiceChunks) -> None:
    """Write each event once the client has read most of those before it.

    A response that echoes its prompt is long from the start, for each of its choices, and no client reads megabytes in
    a turn. The memory of waiting events is reserved like a response in one piece, or by the size of the events if they
    take more: an event is longer than its token.
    """
    record.memory = memory = exchange.response.memory
    served, errors, waiting_bytes = _served(exchange, record), list[Exception](), 0
    send, receive = trio.open_memory_channel[bytes](inf)  # at most what `memory` has reserved

    def on_reply(reply: RenderedReply) -> None:
        nonlocal waiting_bytes
        if events := _events(reply, chunks):
            memory.grow(max(0, waiting_bytes + len(events) - memory.size_bytes))
            waiting_bytes += len(events)
            send.send_nowait(events)

    async def write() -> None:
        nonlocal waiting_bytes
        try:
            async for events in receive:
                await exchange.response.outbox.wait_room(len(events))
                exchange.response.stream(events)
                waiting_bytes -= len(events)
        except (SlowClient, trio.BrokenResourceError) as error:
            errors.append(error)
            nursery.cancel_scope.cancel(reason="the client is gone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        try:
            last = await exchange.gateway.answer(respond, served, record, on_reply, chunks.finish)
        except RequestError as error:
            errors.append(error)
            nursery.cancel_scope.cancel(reason="the answer has failed")
        send.close()
    if errors:
        raise errors[0]
    exchange.response.finish(last)


def _events(reply: RenderedReply, chunks: ChoiceChunks) -> bytes:
    match reply:
        case Text() | Reasoning() | CallPart():
            return chunks.piece(reply)
        case ChoiceEnded():
            return chunks.choice_ended(reply)
        case Accepted() | Started():
            return b""


def _served(exchange: Exchange, record: RequestRecord) -> ServedModel:
    return exchange.gateway.runner.find(record.model)
