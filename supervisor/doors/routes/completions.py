"""Completions of texts, streamed or not."""

from __future__ import annotations

from functools import partial

from protocol.dialects import completions
from supervisor.doors.exchange import Exchange
from supervisor.doors.routes.answering import in_chunks, in_one_piece


async def answer(exchange: Exchange, body: bytes) -> None:
    """Answer one request; raises the `RequestError` that ended the answer before it began."""
    asked = completions.parse(body)
    ours, created = exchange.door.new_id(), int(exchange.door.now())
    counted = exchange.counted(asked.model, "completions")
    respond = completions.to_respond(asked, request_id=ours)
    if asked.stream:
        chunks = completions.Chunks(asked, request_id=ours, created=created)
        await in_chunks(exchange, counted, respond, chunks)
    else:
        completion = partial(completions.completion, asked, request_id=ours, created=created)
        await in_one_piece(exchange, counted, respond, completion)
