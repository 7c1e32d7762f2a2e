"""The contract of every embedder, checked on the one that is given: simulated or real, in virtual or real time."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from math import isclose, sqrt
from random import Random

import pytest
import trio
from attrs import define

from actors.engines.embedding.embed_check import ITEMS_MAX
from actors.engines.embedding.port import Embedder, VectorsAnswer
from protocol.errors import BadRequest, ContextTooLong, Overloaded, Unsupported
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, TextItem, Vectors
from protocol.tensors import Dtype, size_bytes
from protocol.token_ids import TokenIds
from tests.contracts.submission import (
    RESULT_WITHIN_S,
    abort_again,
    abort_while_computed,
    check_all,
    leave,
    new_id,
    numbers,
    submitted,
    take_again,
)

MakeEmbedder = Callable[[], AbstractAsyncContextManager[Embedder]]
MakeItem = Callable[[Embedder, int, int], TextItem]
"""Returns an item of so many tokens for an embedder; those of different numbers differ."""

LONG = 48  # tokens
LENGTH_TOLERANCE = 1e-3  # of the length of a vector


def plain_item(engine: Embedder, number: int, length: int) -> TextItem:
    """Return a text of any tokens, or a pair if the embedder takes these."""
    chance, most = Random(number), engine.info.vocabulary_size
    tokens = TokenIds.of(chance.randrange(most) for _ in range(max(2, length)))
    is_pair = properties(engine).output is EmbeddingOutput.SCORES
    return TextItem(tokens, len(tokens) // 2 if is_pair else 0)


def properties(engine: Embedder) -> EmbeddingInfo:
    """Return the properties of an embedder's vectors."""
    assert engine.info.embedding is not None
    return engine.info.embedding


@define(eq=False)
class Subject:
    """The embedder that is checked; an element of two vectors of one item may differ by `tolerance`."""

    engine: Embedder
    make_item: MakeItem
    tolerance: float

    def item(self, length: int = 5) -> TextItem:
        """Return an item that nobody has had computed yet."""
        return self.make_item(self.engine, next(numbers), length)

    def items(self, number: int) -> tuple[TextItem, ...]:
        """Return new items of several lengths."""
        return tuple(self.item(3 + index * 7 % 23) for index in range(number))

    def alike(self, one: Sequence[float], other: Sequence[float]) -> bool:
        """Whether two vectors are those of one item."""
        return len(one) == len(other) and all(
            abs(left - right) <= self.tolerance for left, right in zip(one, other, strict=True)
        )


async def check_embedder(make_embedder: MakeEmbedder, make_item: MakeItem = plain_item, tolerance: float = 0.0) -> None:
    """Check one embedder against the port; each check leaves it as idle as it found it."""
    async with make_embedder() as engine:
        await check_all(engine, Subject(engine, make_item, tolerance), CHECKS)


def embed(*items: TextItem, dimensions: int | None = None) -> Embed:
    """Return a request with a new id."""
    return Embed(new_id(), items, dimensions)


async def rows(answer: VectorsAnswer) -> list[list[float]]:
    """Wait for the good end of a request, and return its vectors."""
    with trio.fail_after(RESULT_WITHIN_S):
        result = await answer.result()
    assert isinstance(result, Vectors)
    result.check_tensors()
    assert result.data.dtype is Dtype.FLOAT32
    assert len(result.data.data) == size_bytes(result.data)
    items, width = result.data.shape
    elements = array("f", bytes(result.data.data)).tolist()
    return [elements[index * width : (index + 1) * width] for index in range(items)]


async def computed(subject: Subject, *items: TextItem, dimensions: int | None = None) -> list[list[float]]:
    """Return the vectors of items of one request."""
    async with submitted(subject.engine, embed(*items, dimensions=dimensions)) as answer:
        vectors = await rows(answer)
    assert len(vectors) == len(items), "one vector an item"
    width = dimensions or properties(subject.engine).width
    assert {len(vector) for vector in vectors} == {width}
    return vectors


# The promises, one by one ----------------------------------------------------------------


async def states_what_it_computes(subject: Subject) -> None:
    info, embedding = subject.engine.info, properties(subject.engine)
    assert embedding.width >= 1
    assert embedding.output is EmbeddingOutput.VECTORS or embedding.width == 1
    assert min(info.vocabulary_size, info.request_tokens_max, info.running_max) >= 1
    assert all(1 <= number <= embedding.width for number in embedding.matryoshka_dimensions)
    await trio.lowlevel.checkpoint()


async def computes_equal_items_alike_and_others_not(subject: Subject) -> None:
    item = subject.item()
    (first,), (again,), (other,) = [await computed(subject, each) for each in (item, item, subject.item())]
    assert subject.alike(first, again)
    assert not subject.alike(first, other)


async def returns_vectors_of_the_stated_length(subject: Subject) -> None:
    if properties(subject.engine).normalised:
        for vector in await computed(subject, *subject.items(3)):
            assert isclose(length_of(vector), 1, abs_tol=LENGTH_TOLERANCE)


def length_of(vector: Sequence[float]) -> float:
    return sqrt(sum(number * number for number in vector))


async def computes_an_item_alike_in_any_request(subject: Subject) -> None:
    items = subject.items(5)
    alone = [vector for item in items for vector in await computed(subject, item)]
    for vector, expected in zip(await computed(subject, *items), alone, strict=True):
        assert subject.alike(vector, expected), "the items beside it change nothing, and the order is kept"
    for vector, expected in zip(await computed(subject, *items[::-1]), alone[::-1], strict=True):
        assert subject.alike(vector, expected)


async def computes_an_item_alike_beside_other_requests(subject: Subject) -> None:
    items, others = subject.items(3), subject.items(7)
    alone = await computed(subject, *items)
    async with submitted(subject.engine, embed(*others)), submitted(subject.engine, embed(*items)) as answer:
        for vector, expected in zip(await rows(answer), alone, strict=True):
            assert subject.alike(vector, expected)


async def cuts_and_normalises_again(subject: Subject) -> None:
    embedding, item = properties(subject.engine), subject.item()
    if not embedding.is_matryoshka:
        return
    for dimensions in embedding.matryoshka_dimensions or (1, max(1, embedding.width // 2), embedding.width):
        (whole,) = await computed(subject, item)
        (cut,) = await computed(subject, item, dimensions=dimensions)
        length = length_of(whole[:dimensions]) if embedding.normalised else 1.0
        expected = [number / length for number in whole[:dimensions]]
        assert all(isclose(*pair, abs_tol=max(subject.tolerance, 1e-5)) for pair in zip(cut, expected, strict=True))


async def refuses_an_impossible_request(subject: Subject) -> None:
    info, good = subject.engine.info, subject.item()
    beyond = TextItem(TokenIds.of([0, info.vocabulary_size]), good.second_at and 1)
    too_long = TextItem(TokenIds.of([0] * (info.request_tokens_max + 1)), good.second_at and 1)
    for request, error in (
        (embed(), BadRequest),
        (embed(*[good] * (ITEMS_MAX + 1)), BadRequest),
        (embed(good, TextItem(TokenIds())), BadRequest),
        (embed(good, beyond), BadRequest),
        (embed(good, too_long), ContextTooLong),
        (embed(good, TextItem(good.tokens, 0 if good.second_at else 1)), BadRequest),
        (embed(good, dimensions=properties(subject.engine).width + 1), Unsupported),
    ):
        with pytest.raises(error):
            subject.engine.submit(request)
    assert len(await computed(subject, good)) == 1


async def takes_a_full_request(subject: Subject) -> None:
    assert len(await computed(subject, *subject.items(ITEMS_MAX))) == ITEMS_MAX


async def takes_a_long_item(subject: Subject) -> None:
    assert len(await computed(subject, subject.item(min(LONG, subject.engine.info.request_tokens_max)))) == 1


async def aborts_in_the_turn_of_submit(subject: Subject) -> None:
    request = embed(*subject.items(3))
    await leave(subject.engine, request, subject.engine.submit(request))


async def aborts_what_it_computes(subject: Subject) -> None:
    await abort_while_computed(subject.engine, lambda: embed(*subject.items(ITEMS_MAX)))


async def aborts_one_request_and_no_other(subject: Subject) -> None:
    items = subject.items(3)
    alone, left = await computed(subject, *items), embed(*subject.items(ITEMS_MAX))
    async with submitted(subject.engine, embed(*items)) as answer:
        await leave(subject.engine, left, subject.engine.submit(left))
        assert all(map(subject.alike, await rows(answer), alone))


async def aborts_twice_and_after_the_end_change_nothing(subject: Subject) -> None:
    await abort_again(subject.engine, lambda: embed(subject.item()))


async def takes_an_id_again_after_its_release(subject: Subject) -> None:
    await take_again(subject.engine, embed(subject.item()))


async def counts_the_items_that_it_holds(subject: Subject) -> None:
    first, second = embed(*subject.items(2)), embed(subject.item())
    async with submitted(subject.engine, first), submitted(subject.engine, second) as answer:
        load = await subject.engine.load()
        assert load.running + load.waiting <= 3  # what has ended may be on its way
        await rows(answer)


async def refuses_or_queues_but_never_blocks(subject: Subject) -> None:
    taken: list[tuple[Embed, VectorsAnswer]] = []
    for _ in range(subject.engine.info.running_max + 12):
        request = embed(subject.item())
        try:
            taken.append((request, subject.engine.submit(request)))
        except Overloaded:
            continue
    assert len(taken) > subject.engine.info.running_max, "one request may wait behind those that are computed"
    for request, answer in taken:
        await rows(answer)
        await subject.engine.wait_released(request.id)


CHECKS: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    states_what_it_computes,
    computes_equal_items_alike_and_others_not,
    returns_vectors_of_the_stated_length,
    computes_an_item_alike_in_any_request,
    computes_an_item_alike_beside_other_requests,
    cuts_and_normalises_again,
    refuses_an_impossible_request,
    takes_a_full_request,
    takes_a_long_item,
    aborts_in_the_turn_of_submit,
    aborts_what_it_computes,
    aborts_one_request_and_no_other,
    aborts_twice_and_after_the_end_change_nothing,
    takes_an_id_again_after_its_release,
    counts_the_items_that_it_holds,
    refuses_or_queues_but_never_blocks,
)
