"""What all routes do that answer with a model's words: in one piece, or in server-sent events as they come."""

from __future__ import annotations

from typing import Protocol

from actors.processor import TextReply
from protocol.dialects.choices import ChoiceChunks
from protocol.dialects.gathered import Gathered
from protocol.errors import RequestError
from protocol.messages import Accepted, Answered, ChoiceEnded, Respond, Started, Text
from supervisor.doors.asking import Counted, Served
from supervisor.doors.exchange import JSON, Exchange


class Completion(Protocol):
    """Builds the body of one answer."""

    def __call__(self, *, gathered: Gathered, answered: Answered) -> bytes:
        """Return everything that was said."""


async def in_one_piece(exchange: Exchange, counted: Counted, respond: Respond, completion: Completion) -> None:
    """Answer when everything is there; raises the `RequestError` that ended the answer."""
    counted.held = exchange.answer_held
    gathered = Gathered()

    def finish(answered: Answered) -> bytes:
        return completion(gathered=gathered, answered=answered)

    body = await exchange.door.answer(respond, _served(exchange, counted), counted, gathered.add, finish)
    exchange.reply(200, [JSON], body)


async def in_chunks(exchange: Exchange, counted: Counted, respond: Respond, chunks: ChoiceChunks) -> None:
    """Answer as the text comes; raises the `RequestError` that ended the answer before it began."""

    def pass_on(reply: TextReply) -> None:
        match reply:
            case Text():
                exchange.stream(chunks.text(reply))
            case ChoiceEnded():
                exchange.stream(chunks.choice_ended(reply))
            case Accepted() | Started():
                pass

    try:
        last = await exchange.door.answer(respond, _served(exchange, counted), counted, pass_on, chunks.finish)
    except RequestError as error:
        if not exchange.begun:
            raise
        exchange.cut(chunks.failed(error), error)
    else:
        exchange.finish(last)


def _served(exchange: Exchange, counted: Counted) -> Served:
    return exchange.door.asking.find(counted.model)
