"""The token ids of each prompt of a client's request, within the limits of its model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import trio
from attrs import frozen

from actors.kit.offload import RunWork
from actors.media.placeholders import expand
from actors.text.encoding import UnknownToken, check_ids, tokenize_conversation, tokenize_text
from actors.text.first_parts import TooManyTokens
from actors.text.limits import PromptLimits
from actors.text.model import TextModel
from actors.text.prompt_reuse import PromptReuse
from protocol.errors import BadRequest
from protocol.messages.generation import PromptBlocks
from protocol.messages.media import MediaItem
from protocol.messages.text import Respond, Role, Turn
from protocol.token_ids import TokenIds


@frozen
class Prompt:
    """The token ids of one prompt, with as many placeholders for each image or video as it has tokens."""

    tokens: TokenIds
    media: tuple[MediaItem, ...] = ()
    blocks: tuple[PromptBlocks, ...] = ()  # as far as they are known with the ids
    reused: int = 0  # tokens that were not tokenised again


async def encode_prompts(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    run: RunWork,
    media: tuple[MediaItem, ...] = (),
    reuse: PromptReuse | None = None,
) -> list[Prompt]:
    """Return each prompt; `media` are the items of all turns. With `reuse` conversations are tokenised in part.

    Raises `BadRequest` for a prompt that does not fit, has unknown ids, or has no place for an item.
    """
    await trio.lowlevel.checkpoint()
    prompts: list[Prompt] = []
    count = len(request.texts) or len(request.token_lists) or 1
    param = request.param("turns")
    for index in range(count):
        name = f"prompt {index}" if count > 1 else "the prompt"
        try:
            if request.turns:
                prompt = await _conversation(request, model, limits, run, media, reuse)
            elif request.texts:
                tokens = await tokenize_text(request.texts[index], model, limits.tokens_max, run)
                prompt = Prompt(expand(tokens, (), model.vision, param))
            else:
                ids = request.token_lists[index] if request.token_lists else _first_token(request, model)
                tokens = await check_ids(ids, limits.info.vocabulary_size, limits.tokens_max, run)
                prompt = Prompt(expand(tokens, (), model.vision, param))
        except TooManyTokens as error:
            raise limits.too_long(request, str(error), name) from None
        except BadRequest as error:
            error.param = error.param or param
            raise
        except UnknownToken as error:
            raise BadRequest(f"{name} has a token id outside {error}", param=param) from None
        if not prompt.tokens:
            raise BadRequest(f"{name} is empty", param=param)
        limits.check_length(request, len(prompt.tokens), name)
        prompts.append(prompt)
    return prompts


def _first_token(request: Respond, model: TextModel) -> tuple[int, ...]:
    """Return the prompt of a request without one; raises `BadRequest` if the model has no token for it."""
    if model.first_token is None:
        sentence = "the prompt is missing, and this model has no token that begins a text"
        raise BadRequest(sentence, param=request.param("turns"))
    return (model.first_token,)


async def _conversation(
    request: Respond,
    model: TextModel,
    limits: PromptLimits,
    run: RunWork,
    media: tuple[MediaItem, ...],
    reuse: PromptReuse | None,
) -> Prompt:
    """Return the prompt of a conversation; if it may be truncated, without the oldest turns that do not fit.

    Raises `TooManyTokens` for one that certainly does not fit.
    """
    await trio.lowlevel.checkpoint()
    items = _items_of_turns(request.turns, media)

    async def read(turns: tuple[Turn, ...], items: Sequence[tuple[MediaItem, ...]]) -> Prompt:
        encoded = await tokenize_conversation(turns, model, limits.tokens_max, run, request.rendering, reuse)
        media = tuple(chain.from_iterable(items))
        tokens = expand(encoded.tokens, media, model.vision, request.param("turns"))
        # An item has more tokens than the text: the hashes of the text are not those of the prompt.
        return Prompt(tokens, media, () if media else encoded.blocks, encoded.reused)

    if not request.truncate:
        return await read(request.turns, items)
    begin = next((index for index, turn in enumerate(request.turns) if not _leads(turn)), len(request.turns))
    kept, rest = request.turns[:begin], request.turns[begin:]

    async def read_from(first: int) -> Prompt:
        return await read(kept + rest[first:], items[:begin] + items[begin + first :])

    async def fitting(first: int) -> Prompt | None:
        await trio.lowlevel.checkpoint()
        try:
            prompt = await read_from(first)
        except TooManyTokens:
            return None
        return prompt if limits.fits(request, len(prompt.tokens)) else None

    # Many templates refuse a conversation that begins with an answer. The last turn is kept in any case.
    questions = [start for start in range(1, len(rest)) if rest[start].role is Role.USER]
    starts = [0, *(questions or range(len(rest))[1:][-1:])]
    # A binary search that begins with the whole conversation, which nearly always fits.
    low, high, middle = 0, len(starts) - 1, 0
    best: Prompt | None = None
    while low < high:
        if (prompt := await fitting(starts[middle])) is not None:
            high, best = middle, prompt
        else:
            low = middle + 1
        middle = (low + high) // 2
    return await read_from(starts[high]) if best is None else best


def _items_of_turns(turns: Sequence[Turn], media: tuple[MediaItem, ...]) -> list[tuple[MediaItem, ...]]:
    """Return the items of each turn; `media` are those of all turns."""
    items = iter(media)
    return [tuple(islice(items, len(turn.media))) if media else () for turn in turns]


def _leads(turn: Turn) -> bool:
    return turn.role in {Role.SYSTEM, Role.DEVELOPER}
