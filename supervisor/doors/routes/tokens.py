"""From texts to token ids and back, by the tokenizer of a model that is served here."""

from __future__ import annotations

import trio
from attrs import evolve

from actors.processor import TextRequest, TextResult
from protocol.dialects import tokens
from protocol.dialects.keyfile import clamped
from protocol.errors import DeadlineExceeded
from protocol.messages import Detokenized, Tokenized
from supervisor.doors.exchange import JSON, Exchange
from supervisor.doors.routes.route import noted


async def tokenize(exchange: Exchange, body: bytes) -> None:
    """Answer with the token ids of a text or of a conversation."""
    asked = await exchange.read(tokens.parse_tokenize, body)
    answer = await _ask(exchange, asked.model, tokens.to_tokenize(asked))
    assert isinstance(answer, Tokenized)  # nothing else answers a Tokenize
    exchange.reply(200, [JSON], tokens.tokenized(answer))
    noted(exchange)


async def detokenize(exchange: Exchange, body: bytes) -> None:
    """Answer with the text of token ids."""
    asked = await exchange.read(tokens.parse_detokenize, body)
    answer = await _ask(exchange, asked.model, tokens.to_detokenize(asked))
    assert isinstance(answer, Detokenized)  # nothing else answers a Detokenize
    exchange.reply(200, [JSON], tokens.detokenized(answer))
    noted(exchange)


async def _ask(exchange: Exchange, model: str | None, request: TextRequest) -> TextResult | None:
    """Ask a model's processor, for which the same limits hold as for its words."""
    door = exchange.door
    key, limit_s = exchange.key or door.keys.anybody, door.asking.first_token_s
    asks = door.asking.find_only(model).ask
    with key.asking(), trio.move_on_after(limit_s):
        owned = evolve(request, owner=key.name)
        priority = clamped(None, key.section.priority)
        admitted = door.gate.admitted(priority, owner=key.name, at_most=door.places_of(key))
        async with admitted, asks.ask(owned, 0) as answer:
            return await answer.result()
    raise DeadlineExceeded(f"there was no answer within {limit_s} s")
