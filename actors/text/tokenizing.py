"""Texts to token ids and back, without an engine: the work behind `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from actors.kit.offload import RunWork
from actors.text.encoding import EncodesText, tokenize_text
from actors.text.first_parts import TooManyTokens
from protocol.errors import ContextTooLong
from protocol.messages.text import Detokenize, Detokenized
from protocol.token_ids import TokenIds

TOKENIZE_TOKENS_MAX = 262_144


class DecodesTokens(Protocol):
    """A model whose token ids are read."""

    def decode(self, ids: Sequence[int], param: str | None = None) -> str:
        """Return the text of token ids; raises `BadRequest`, about `param`, for unknown ids."""


def check_count(ids: TokenIds, tokens_max: int, param: str) -> TokenIds:
    """Return the ids; raises `ContextTooLong` for too many."""
    if len(ids) > tokens_max:
        raise too_long(str(len(ids)), tokens_max, param)
    return ids


def too_long(length: str, tokens_max: int, param: str) -> ContextTooLong:
    """Return the error of a text that is too long to be only tokenised."""
    sentence = f"the text is {length} tokens long, and one that is only tokenised can have {tokens_max}"
    return ContextTooLong(sentence, param=param)


async def tokenize_only(
    text: str, model: EncodesText, tokens_max: int, run: RunWork, *, special: bool, param: str
) -> TokenIds:
    """Return the token ids of a text; raises `ContextTooLong`."""
    try:
        return check_count(await tokenize_text(text, model, tokens_max, run, special=special), tokens_max, param)
    except TooManyTokens as error:
        raise too_long(str(error), tokens_max, param) from None


async def detokenize(request: Detokenize, model: DecodesTokens, tokens_max: int, run: RunWork) -> Detokenized:
    """Return the text of token ids; raises `ContextTooLong`, or `BadRequest` for unknown ones."""
    if len(request.ids) > tokens_max:
        sentence = f"there are {len(request.ids)} tokens, and a list that is only read can have {tokens_max}"
        raise ContextTooLong(sentence, param="tokens")
    return Detokenized(await run(len(request.ids), partial(model.decode, request.ids, "tokens")))
