"""Texts and conversations to token ids, with a bound on the cost of those that are too long.

A text that is certainly too long is refused by its number of characters, or once a first part of it was tokenised. So a
refusal costs no more than a prompt that fits, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from actors.kit.offload import Offload
from actors.text.model import TextModel
from protocol.messages.text import Turn

TURN_CHARACTERS = 32  # that a chat template adds to each turn
FIRST_CHARACTERS_A_TOKEN = 4  # of the first part: most texts that fit are shorter, and so are tokenised once
GROWTH = 4  # from one part to the next
SEAM_TOKENS = 1_024
"""The most tokens that a part may have more than the whole text: those at the cut, and those that the tokenizer adds
around a text. The longest words in any vocabulary have far fewer."""


class TooManyTokens(Exception):
    """A text certainly has more tokens than it may have; the message is their number, as far as it is known."""


async def tokenize_text(
    text: str, model: TextModel, tokens_max: int, work: Offload, *, special: bool = True
) -> list[int]:
    """Return the token ids of a text; raises `TooManyTokens` for one that certainly has more than `tokens_max`.

    A text with slightly more may be returned. `special` adds the tokens that the tokenizer puts around a text.
    """
    longest = model.characters_per_token_max
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
    """Return the token ids of a conversation up to the answer; raises `TooManyTokens` as `tokenize_text` does."""
    characters = sum([len(turn.text) for turn in turns]) + TURN_CHARACTERS * len(turns)
    prompt = await work.run(characters, partial(model.prompt, turns))
    return await tokenize_text(prompt, model, tokens_max, work, special=False)


def _count(model: TextModel, text: str, characters: int, *, special: bool) -> int:
    return len(model.encode_text(text[:characters], special=special))
