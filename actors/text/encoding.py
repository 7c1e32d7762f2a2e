"""Texts and conversations to token ids, as far as they may be long.

What is surely too long is refused by its characters, or after a first part of it has been tokenised: a refusal costs
what a prompt costs that fits, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from actors.kit.offload import Offload
from actors.text.model import TextModel
from protocol.text_messages import Turn

TURN_CHARACTERS = 32  # that a chat template puts around each turn
FIRST_CHARACTERS_A_TOKEN = 4  # of the first part: most texts that fit are no longer, and are tokenised once
GROWTH = 4  # from one part to the next
SEAM_TOKENS = 1_024
"""How many tokens fewer a whole text may have than a part of it: what stands where the part is cut off, and what the
tokenizer puts around a text. The longest words of a vocabulary, and of WordPiece, stay far below that."""


class TooManyTokens(Exception):
    """A text surely has more tokens than it may have; the message says how many, as far as that is known."""


async def tokenize_text(
    text: str, model: TextModel, tokens_max: int, work: Offload, *, special: bool = True
) -> list[int]:
    """Return the token ids of a text; raises `TooManyTokens` for one that surely has more than `tokens_max`.

    One that has a few more may be returned. `special` adds what the tokenizer puts around a text.
    """
    longest = model.characters_a_token
    if longest is not None and len(text) > tokens_max * longest:
        raise TooManyTokens(f"more than {tokens_max}")
    part = max(FIRST_CHARACTERS_A_TOKEN * tokens_max, FIRST_CHARACTERS_A_TOKEN * SEAM_TOKENS)
    while part < len(text):
        count = await work.run(part, partial(_count, model, text, part, special=special))
        if count > tokens_max + SEAM_TOKENS:
            raise TooManyTokens(f"more than {tokens_max}")
        part *= GROWTH
    return await work.run(len(text), partial(model.encode_text, text, special=special))


async def tokenize_conversation(turns: Sequence[Turn], model: TextModel, tokens_max: int, work: Offload) -> list[int]:
    """Return the token ids of a conversation, ready for the answer; raises `TooManyTokens` as `tokenize_text` does."""
    characters = sum([len(turn.content) for turn in turns]) + TURN_CHARACTERS * len(turns)
    prompt = await work.run(characters, partial(model.prompt, turns))
    return await tokenize_text(prompt, model, tokens_max, work, special=False)


def _count(model: TextModel, text: str, characters: int, *, special: bool) -> int:
    return len(model.encode_text(text[:characters], special=special))
