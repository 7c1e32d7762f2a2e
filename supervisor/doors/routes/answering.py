"""What all routes do that answer with a model's words: in one piece, or in server-sent events as they come."""

from __future__ import annotations

from actors.processor import TextReply
from protocol.dialects.choices import ChoiceChunks
from protocol.dialects.gathered import Gathered
from protocol.errors import RequestError
from protocol.messages import Accepted, ChoiceEnded, Respond, Started, Text
from supervisor.doors.asking import Counted, Served
from supervisor.doors.exchange import JSON, Exchange


async def in_one_piece(exchange: Exchange, counted: Counted, respond: Respond, gathered: Gathered) -> None:
    """Answer when everything is there; raises the `RequestError` that ended the answer."""
    counted.held = exchange.answer_held
    served = _served(exchange, counted)
    body = await exchange.door.answer(respond, served, counted, gathered.add, gathered.finish)
    await exchange.reply_in_pieces(200, [JSON], body.size, body.pieces())


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
