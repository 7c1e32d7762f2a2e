"""Texts and conversations to token ids, with a bound on the cost of a text that is too long.

A text that is certainly too long is refused by its number of characters, or once a first part of it was tokenised. So a
refusal costs about twice as much as a prompt that fits, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from actors.kit.offload import RunWork
from actors.text.first_parts import SEAM_TOKENS, TooManyTokens, first_parts
from actors.text.model import TextModel
from actors.text.prompt_cache import EncodedPrompt, Found
from actors.text.prompt_reuse import PromptReuse
from protocol.messages.text import DEFAULT_RENDERING, Rendering, Turn
from protocol.token_ids import TokenIds

# The characters that are copied, digested or searched in the time in which one is tokenised.
COPIED_CHARACTERS = 32
# The characters that a chat template adds to each turn, about.
TURN_CHARACTERS = 32
# The work for one step of a chat template, in characters to tokenise.
STEP_CHARACTERS = 4
# The work for a character of a tool or of a call, in characters to tokenise: its JSON is read, and templates walk it.
TOOL_CHARACTER_WORK = 6


class UnknownToken(Exception):
    """One of several token ids is none of the model's; the message is the range of the model's ids."""


class EncodesText(Protocol):
    """A model that texts are encoded for."""

    @property
    def characters_per_token_max(self) -> int | None:
        """The most characters of one token; None: no bound."""

    def encode_text(self, text: str, *, special: bool = True) -> TokenIds:
        """Return the token ids of a text; `special` adds the tokenizer's own tokens around it."""


async def tokenize_text(
    text: str, model: EncodesText, tokens_max: int, run: RunWork, *, special: bool = True
) -> TokenIds:
    """Return the token ids of a text; raises `TooManyTokens` for one that certainly has more than `tokens_max`.

    A text with slightly more may be returned. `special` adds the tokens that the tokenizer puts around a text.
    """
    _check_characters(text, model, tokens_max)
    for part in first_parts(len(text), tokens_max):
        count = await run(part, partial(_count, model, text, part, special=special))
        if count > tokens_max + SEAM_TOKENS:
            raise TooManyTokens(f"more than {tokens_max}")
    return await run(len(text), partial(model.encode_text, text, special=special))


async def tokenize_conversation(
    turns: Sequence[Turn],
    model: TextModel,
    tokens_max: int,
    run: RunWork,
    rendering: Rendering = DEFAULT_RENDERING,
    reuse: PromptReuse | None = None,
) -> EncodedPrompt:
    """Return the token ids of a conversation up to the answer; raises `TooManyTokens` as `tokenize_text` does.

    With `reuse` only what is new in it is tokenised, and the hashes of its blocks come with the ids.
    """
    if len(turns) * model.turn_tokens_min > tokens_max + SEAM_TOKENS:
        raise TooManyTokens(f"more than {tokens_max}")
    rendering_work = max(TURN_CHARACTERS * len(turns), STEP_CHARACTERS * model.template.cost.steps(len(turns)))
    copied = sum([len(turn.text) + len(turn.reasoning) for turn in turns])
    characters = copied // COPIED_CHARACTERS + rendering_work
    characters += TOOL_CHARACTER_WORK * _tool_characters(turns, rendering)
    if rendering.variables:
        characters += len(repr(rendering.variables))
    boundary = model.boundary
    if reuse is None or boundary is None:
        prompt = await run(characters, partial(model.prompt, turns, rendering))
        return EncodedPrompt(await tokenize_text(prompt, model, tokens_max, run, special=False))

    def find() -> Found:
        return reuse.find(model.prompt(turns, rendering), boundary)

    found = await run(characters + copied // COPIED_CHARACTERS, find)
    _check_characters(found.text, model, tokens_max)
    work = found.new_characters + len(found.text) // COPIED_CHARACTERS
    encoded = await run(work, partial(reuse.complete, found, model, tokens_max))
    reuse.check.sample(model, found.text, encoded)
    return encoded


def _check_characters(text: str, model: EncodesText, tokens_max: int) -> None:
    """Raise `TooManyTokens` for a text with more characters than `tokens_max` tokens can stand for."""
    longest = model.characters_per_token_max
    if longest is not None and len(text) > tokens_max * longest:
        raise TooManyTokens(f"more than {tokens_max}")


def _tool_characters(turns: Sequence[Turn], rendering: Rendering) -> int:
    """Return the characters of the tools that are offered, and of earlier calls."""
    offered = sum([len(tool.description or "") + len(tool.parameters) for tool in rendering.tools])
    return offered + sum([len(call.arguments) for turn in turns for call in turn.calls])


async def check_ids(ids: Sequence[int], vocabulary_size: int, tokens_max: int, run: RunWork) -> TokenIds:
    """Return token ids as one value; raises `TooManyTokens` for more than `tokens_max`, and `UnknownToken`."""
    if len(ids) > tokens_max:
        raise TooManyTokens(str(len(ids)))
    return await run(len(ids), partial(_checked, ids, vocabulary_size - 1))


def _checked(ids: Sequence[int], last: int) -> TokenIds:
    if ids and not 0 <= min(ids) <= max(ids) <= last:
        raise UnknownToken(f"0 to {last}")
    return TokenIds.of(ids)


def _count(model: EncodesText, text: str, characters: int, *, special: bool) -> int:
    return len(model.encode_text(text[:characters], special=special))
