"""Texts and pairs of texts to the items that embedders get, within the limits of their model, and cut into parts.

A text beyond the limit is refused, with its number of tokens and its place in the request, or cut if its client asks
for a cut. Short texts are tokenised many at a time: a list of two thousand words is a few pieces of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import trio
from attrs import frozen

from actors.kit.offload import RunWork
from actors.text.embedding_model import EmbeddingModel
from actors.text.encoding import UnknownToken, check_ids
from actors.text.first_parts import FIRST_CHARACTERS_A_TOKEN, SEAM_TOKENS, TooManyTokens, first_parts
from protocol.errors import BadRequest, ContextTooLong
from protocol.messages.embedding import Cut, ScoreTexts, TextItem

T = TypeVar("T")

PART_TOKENS = 8_192
"""The most tokens of a part with several items: an engine computes about so many in one step."""

GROUP_CHARACTERS = 16_384
"""The most characters of several texts that are tokenised in one piece of work."""

PAIR_TOKENS_MAX = 2**20
"""The most tokens of the queries in all pairs of one request: each pair has those of its query again."""


@frozen
class ItemLimits:
    """The limits of the items of one request; without a `cut` a text beyond them is refused."""

    tokens_max: int  # of one item
    vocabulary_size: int
    cut: Cut | None = None

    @property
    def cut_to(self) -> int | None:
        """The tokens to which an item is cut; None: none is."""
        if self.cut is None:
            return None
        return min(self.cut.tokens_max or self.tokens_max, self.tokens_max)


def param_of(name: str, index: int, count: int) -> str:
    """Return the client's name of one of its texts: of several, with its index."""
    return f"{name}[{index}]" if count > 1 else name


def parts_of(items: Sequence[TextItem], items_max: int) -> tuple[tuple[TextItem, ...], ...]:
    """Return the items in their order, cut into parts of at most `items_max` items and about `PART_TOKENS` tokens."""
    sizes = [len(item.tokens) for item in items]
    return tuple(map(tuple, _groups(items, sizes, PART_TOKENS, items_max)))


async def text_items(
    texts: Sequence[str], prompt: str, model: EmbeddingModel, limits: ItemLimits, run: RunWork, name: str
) -> list[TextItem]:
    """Return each text, behind a prompt, as an item; raises `BadRequest` about `name` for one that has no item."""
    items: list[TextItem] = []
    texts = await _texts([prompt + text for text in texts], model, limits, run, name)
    for group in _groups(texts, [*map(len, texts)], GROUP_CHARACTERS):
        items += await run(sum(map(len, group)), partial(_encode_texts, group, model, limits.cut_to))
    _check_lengths(items, limits, name)
    return items


async def id_items(lists: Sequence[tuple[int, ...]], limits: ItemLimits, run: RunWork, name: str) -> list[TextItem]:
    """Return each list of token ids as an item, as it is; raises `BadRequest` about `name` for one that has none."""
    await trio.lowlevel.checkpoint()
    items: list[TextItem] = []
    for index, ids in enumerate(lists):
        param = param_of(name, index, len(lists))
        try:
            kept = ids[: limits.cut_to]
            items.append(TextItem(await check_ids(kept, limits.vocabulary_size, limits.tokens_max, run)))
        except TooManyTokens as error:
            raise _too_long(str(error), limits, param) from None
        except UnknownToken as error:
            raise BadRequest(f"{param} has a token id outside {error}", param=param) from None
    return items


async def pair_items(request: ScoreTexts, model: EmbeddingModel, limits: ItemLimits, run: RunWork) -> list[TextItem]:
    """Return each document with its query as an item; raises `BadRequest` for one that has none."""
    query, document = (request.params.get(field, field) for field in ("queries", "documents"))
    queries = await _texts(request.queries, model, limits, run, query)
    documents = await _texts(request.documents, model, limits, run, document)
    await _check_queries(queries, request.count, model, limits, run, query)
    items: list[TextItem] = []
    pairs = [(queries[index if len(queries) > 1 else 0], text) for index, text in enumerate(documents)]
    for group in _groups(pairs, [len(first) + len(second) for first, second in pairs], GROUP_CHARACTERS):
        work = sum(len(first) + len(second) for first, second in group)
        items += await run(work, partial(_encode_pairs, group, model, limits))
    if (empty := next((index for index, item in enumerate(items) if not item.second_at), None)) is not None:
        param = param_of(document, empty, len(items))
        raise BadRequest(f"{param} has no tokens", param=param)
    _check_lengths(items, limits, document)
    return items


async def _texts(texts: Sequence[str], model: EmbeddingModel, limits: ItemLimits, run: RunWork, name: str) -> list[str]:
    """Return the texts, and of those that will be cut a beginning; raises `ContextTooLong`."""
    await trio.lowlevel.checkpoint()
    count, short = len(texts), FIRST_CHARACTERS_A_TOKEN * limits.tokens_max
    return [
        text if len(text) <= short else await _beginning(text, model, limits, run, param_of(name, index, count))
        for index, text in enumerate(texts)
    ]


async def _check_queries(
    queries: Sequence[str], count: int, model: EmbeddingModel, limits: ItemLimits, run: RunWork, name: str
) -> None:
    """Raise `BadRequest` for a query that leaves no room for a document, and for too many tokens of all together."""
    await trio.lowlevel.checkpoint()
    room = limits.tokens_max - model.tokens_around_pair - 1
    total = 0
    for index, query in enumerate(queries):
        tokens = await run(len(query), partial(_count, model, query))
        param = param_of(name, index, len(queries))
        if tokens > room:
            raise ContextTooLong(f"{param} is {tokens} tokens long, and a query here can have {room}", param=param)
        total += tokens * (count if len(queries) == 1 else 1)
    if total > PAIR_TOKENS_MAX:
        raise BadRequest(
            f"the query is computed with each of {count} documents, which makes {total} tokens, and one request can"
            f" have {PAIR_TOKENS_MAX} of them: send fewer documents at a time",
            param=name,
        )


async def _beginning(text: str, model: EmbeddingModel, limits: ItemLimits, run: RunWork, param: str) -> str:
    """Return a text, or if it will be cut a beginning with enough tokens; raises `ContextTooLong`.

    A first part shows whether a text is certainly too long, so its refusal costs about as much as a text within the
    limit.
    """
    longest, most = model.characters_per_token_max, limits.tokens_max
    if limits.cut is None and longest is not None and len(text) > most * longest:
        raise _too_long(f"more than {most}", limits, param)
    for characters in first_parts(len(text), most):
        part = text[:characters]
        if await run(characters, partial(_count, model, part)) > most + SEAM_TOKENS:
            if limits.cut is None:
                raise _too_long(f"more than {most}", limits, param)
            return part
    return text  # noqa: ASYNC910  # a text that is tokenised next


def _check_lengths(items: Sequence[TextItem], limits: ItemLimits, name: str) -> None:
    for index, item in enumerate(items):
        param = param_of(name, index, len(items))
        if not item.tokens:
            raise BadRequest(f"{param} has no tokens", param=param)
        if len(item.tokens) > limits.tokens_max:
            raise _too_long(str(len(item.tokens)), limits, param)


def _too_long(length: str, limits: ItemLimits, param: str) -> ContextTooLong:
    sentence = f"{param} is {length} tokens long, and a text of this model can have {limits.tokens_max}"
    return ContextTooLong(f"{sentence}; truncate_prompt_tokens: -1 leaves out its end", param=param)


def _count(model: EmbeddingModel, text: str) -> int:
    return len(model.encode_text(text, special=False))


def _encode_texts(texts: Sequence[str], model: EmbeddingModel, cut_to: int | None) -> list[TextItem]:
    if cut_to is None:
        return [TextItem(model.encode_text(text)) for text in texts]
    return [TextItem(model.encode_cut(text, cut_to)) for text in texts]


def _encode_pairs(pairs: Sequence[tuple[str, str]], model: EmbeddingModel, limits: ItemLimits) -> list[TextItem]:
    second_max = None if limits.cut is None else limits.cut.second_max
    encoded = model.encoding("")
    last: str | None = None
    items: list[TextItem] = []
    for query, document in pairs:
        if query != last:
            encoded, last = model.encoding(query), query
        items.append(model.pair(encoded, model.encoding(document), tokens_max=limits.cut_to, second_max=second_max))
    return items


def _groups(
    values: Sequence[T], sizes: Sequence[int], size_max: int, count_max: int | None = None
) -> Iterator[list[T]]:
    """Yield the values in their order, as many together as have `size_max` in all; a larger one comes alone."""
    group, total = list[T](), 0
    for value, size in zip(values, sizes, strict=True):
        if group and (total + size > size_max or len(group) == count_max):
            yield group
            group, total = [], 0
        group.append(value)
        total += size
    if group:
        yield group
