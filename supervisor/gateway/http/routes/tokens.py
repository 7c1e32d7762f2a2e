"""Conversion of text to token ids and back, by the tokenizer of a served model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve

from actors.processor import TextRequest, TextResult
from protocol.cost import TOKEN_BYTES
from protocol.dialects import tokens
from protocol.dialects.answer_builder import AnswerBody
from protocol.dialects.request_body import BYTES_A_CHARACTER
from protocol.errors import BadRequest
from protocol.messages.text import Detokenized, Tokenized
from supervisor.gateway.http.exchange import Body, Exchange
from supervisor.gateway.http.response import JSON
from supervisor.gateway.http.routes.route import log_answered


async def tokenize(exchange: Exchange, body: Body) -> None:
    """Answer with the token ids of a text or of a conversation."""
    request = await exchange.read(tokens.parse_tokenize, body)
    answer = await _ask(exchange, request.model, tokens.to_tokenize(request))
    assert isinstance(answer, Tokenized)  # nothing else answers a Tokenize
    await _reply(exchange, TOKEN_BYTES * len(answer.ids), partial(tokens.tokenized, answer))


async def detokenize(exchange: Exchange, body: Body) -> None:
    """Answer with the text of token ids."""
    request = await exchange.read(tokens.parse_detokenize, body)
    answer = await _ask(exchange, request.model, tokens.to_detokenize(request))
    assert isinstance(answer, Detokenized)  # nothing else answers a Detokenize
    await _reply(exchange, 2 * len(answer.text), partial(tokens.detokenized, answer))


async def _reply(exchange: Exchange, size_bytes: int, build: Callable[[], AnswerBody]) -> None:
    """Write a response in one piece, as fast as the client reads: the text of a few tokens can have megabytes.

    Raises `BadRequest` if it could never fit into the memory for responses, `Overloaded` if it does not fit now.
    """
    body = await exchange.offload(size_bytes // BYTES_A_CHARACTER, build)
    if body.size > (bytes_max := exchange.gateway.answer_bytes_max(exchange.request.key)):
        raise BadRequest(
            f"the answer takes {body.size} bytes, and one can have {bytes_max} (answers_bytes_max): ask for less"
        )
    exchange.response.memory.grow(body.size)
    await exchange.response.reply_in_pieces(200, [JSON], body.size, body.pieces())
    log_answered(exchange)


async def _ask(exchange: Exchange, model: str | None, request: TextRequest) -> TextResult | None:
    """Return the result of a model's processor, within the limits that hold for responses."""
    gateway = exchange.gateway
    key = exchange.request.key
    processor = gateway.runner.find_or_only(model).ask
    with key.generating(), gateway.runner.converting():
        owned = evolve(request, owner=key.name)
        priority = key.clamp_priority(None)
        admitted = gateway.gate.admitted(priority, owner=key.name, limits=gateway.places_of(key))
        async with admitted, processor.ask(owned, 0) as answer:
            return await answer.result()
