"""The contract of every encoder, checked on the one that is given: simulated or real, in virtual or real time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from struct import unpack

import pytest
import trio
from attrs import define, evolve

from actors.engines.encoding.port import BatchAnswer, Encoder
from protocol.errors import BadRequest, Overloaded
from protocol.messages.media import EmbeddingBatch, EmbeddingOutcome, EncodeBatch, MediaForm, MediaItem, Modality
from protocol.tensors import BYTES, Dtype, Tensor, size_bytes
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

MakeEncoder = Callable[[], AbstractAsyncContextManager[Encoder]]
MakeItem = Callable[[int, Modality], MediaItem]
"""Returns an item that the engine can encode; the pixels of different numbers differ."""


@define(eq=False)
class Subject:
    """The encoder that is checked; two embeddings of one item may differ by `tolerance` of their largest element."""

    engine: Encoder
    make_item: MakeItem
    tolerance: float

    @property
    def modalities(self) -> list[Modality]:
        media = self.engine.info.media
        assert media is not None
        return [modality for modality in Modality if media.placeholder(modality) is not None]

    def item(self, modality: Modality | None = None) -> MediaItem:
        """Return an item that nobody has encoded yet."""
        return self.make_item(next(numbers), modality or self.modalities[0])


async def check_encoder(make_encoder: MakeEncoder, make_item: MakeItem, tolerance: float = 0.0) -> None:
    """Check one encoder against the port; each check leaves it as idle as it found it."""
    async with make_encoder() as engine:
        subject = Subject(engine, make_item, tolerance)
        assert engine.info.running_max >= 3, "the checks need batches of three items at least"
        await check_all(engine, subject, CHECKS)


def batch(*items: MediaItem) -> EncodeBatch:
    """Return a batch with a new id."""
    return EncodeBatch(new_id(), items)


async def result(answer: BatchAnswer) -> tuple[EmbeddingOutcome, ...]:
    """Wait for the good end of a batch."""
    with trio.fail_after(RESULT_WITHIN_S):
        ended = await answer.result()
    assert isinstance(ended, EmbeddingBatch)
    return ended.outcomes


async def encoded(subject: Subject, *items: MediaItem) -> list[Tensor]:
    """Encode items in one batch, and check what comes of each."""
    wanted, media = batch(*items), subject.engine.info.media
    assert media is not None
    async with submitted(subject.engine, wanted) as answer:
        outcomes = await result(answer)
    assert len(outcomes) == len(items), "one outcome an item"
    for item, outcome in zip(items, outcomes, strict=True):
        assert outcome.code == "", f"{outcome.code}: {outcome.detail}"
        assert outcome.data.shape == (item.tokens, media.width)
        assert outcome.data.dtype is media.dtype
        assert len(outcome.data.data) == size_bytes(outcome.data)
    return [outcome.data for outcome in outcomes]


def elements(tensor: Tensor) -> tuple[float, ...]:
    """Return the elements of a tensor of floating-point numbers."""
    data = bytes(tensor.data)
    if tensor.dtype is Dtype.BFLOAT16:  # the upper half of a float32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    code = "e" if tensor.dtype is Dtype.FLOAT16 else "f"
    return unpack(f"<{len(tensor.data) // BYTES[tensor.dtype]}{code}", data)


def alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors are those of one item."""
    if one.shape != other.shape:
        return False
    pairs = list(zip(elements(one), elements(other), strict=True))
    largest = max(max(abs(left), abs(right)) for left, right in pairs)
    return all(abs(left - right) <= tolerance * largest for left, right in pairs)


# The promises, one by one ----------------------------------------------------------------


async def says_what_it_makes(subject: Subject) -> None:
    info = subject.engine.info
    assert info.media is not None
    assert info.media.form is MediaForm.EMBEDDINGS
    assert subject.modalities, "it takes images or videos"
    assert info.kv_tokens_max == info.context_max == info.vocabulary_size == info.request_tokens_max == 0
    await trio.lowlevel.checkpoint()


async def encodes_equal_pixels_alike_and_others_not(subject: Subject) -> None:
    for modality in subject.modalities:
        item = subject.item(modality)
        (first,), (again,) = await encoded(subject, item), await encoded(subject, item)
        assert alike(first, again, subject.tolerance)
        (other,) = await encoded(subject, subject.item(modality))
        assert not alike(first, other, subject.tolerance)


async def encodes_an_item_alike_in_any_batch(subject: Subject) -> None:
    items = [subject.item(modality) for modality in (*subject.modalities, subject.modalities[0])]
    alone = [tensor for item in items for tensor in await encoded(subject, item)]
    for order in (items, items[::-1]):
        together = dict(zip((item.digest for item in order), await encoded(subject, *order), strict=True))
        for item, tensor in zip(items, alone, strict=True):
            assert alike(together[item.digest], tensor, subject.tolerance), "neighbours change nothing"


async def fails_a_wrong_item_alone(subject: Subject) -> None:
    good = subject.item()
    for wrong in wrong_items(subject.item()):
        async with submitted(subject.engine, batch(wrong, good)) as answer:
            bad, fine = await result(answer)
        assert (bad.code, fine.code) == (BadRequest.code, ""), "an item that is wrong fails alone"
        assert bad.detail
        assert not len(bad.data.data)
        assert len(fine.data.data) == size_bytes(fine.data)


def wrong_items(item: MediaItem) -> Sequence[MediaItem]:
    """Return an item whose tokens, pixels or form are not its grid's."""
    frames, height, width, _ = item.data.shape
    gray = Tensor(Dtype.UINT8, (frames, height, width, 1), item.data.data[: frames * height * width])
    return (
        evolve(item, tokens=item.tokens + 1),
        evolve(item, data=gray),
        evolve(item, data=Tensor(Dtype.FLOAT32, (1, 1, 1, 3), item.data.data[:12])),
        item.place,
    )


async def refuses_an_impossible_batch(subject: Subject) -> None:
    for items in ((), (subject.item(),) * (subject.engine.info.running_max + 1)):
        with pytest.raises(BadRequest):
            subject.engine.submit(batch(*items))


async def takes_a_full_batch(subject: Subject) -> None:
    items = [subject.item() for _ in range(subject.engine.info.running_max)]
    assert len(await encoded(subject, *items)) == len(items)


async def aborts_in_the_turn_of_submit(subject: Subject) -> None:
    wanted = batch(subject.item())
    await leave(subject.engine, wanted, subject.engine.submit(wanted))


async def aborts_what_it_computes(subject: Subject) -> None:
    await abort_while_computed(subject.engine, lambda: batch(*(subject.item() for _ in range(3))))


async def aborts_a_batch_that_waits_and_no_other(subject: Subject) -> None:
    first, second = batch(subject.item(), subject.item()), batch(subject.item())
    async with submitted(subject.engine, first) as answer:
        await leave(subject.engine, second, subject.engine.submit(second))
        assert all(outcome.code == "" for outcome in await result(answer))


async def aborts_twice_and_after_the_end_change_nothing(subject: Subject) -> None:
    await abort_again(subject.engine, lambda: batch(subject.item()))


async def takes_an_id_again_after_its_release(subject: Subject) -> None:
    await take_again(subject.engine, batch(subject.item()))


async def counts_what_it_holds(subject: Subject) -> None:
    first, second = batch(subject.item(), subject.item()), batch(subject.item())
    async with submitted(subject.engine, first), submitted(subject.engine, second) as after:
        load = await subject.engine.load()
        assert load.running + load.waiting <= 3  # what has ended may be on its way
        assert load.kv_tokens_used == 0
        await result(after)


async def refuses_or_queues_but_never_blocks(subject: Subject) -> None:
    taken: list[tuple[EncodeBatch, BatchAnswer]] = []
    for _ in range(12):
        wanted = batch(subject.item())
        try:
            taken.append((wanted, subject.engine.submit(wanted)))
        except Overloaded:
            continue
    assert len(taken) >= 2, "one batch may wait behind another"
    for wanted, answer in taken:
        await result(answer)
        await subject.engine.wait_released(wanted.id)


CHECKS: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    says_what_it_makes,
    encodes_equal_pixels_alike_and_others_not,
    encodes_an_item_alike_in_any_batch,
    fails_a_wrong_item_alone,
    refuses_an_impossible_batch,
    takes_a_full_batch,
    aborts_in_the_turn_of_submit,
    aborts_what_it_computes,
    aborts_a_batch_that_waits_and_no_other,
    aborts_twice_and_after_the_end_change_nothing,
    takes_an_id_again_after_its_release,
    counts_what_it_holds,
    refuses_or_queues_but_never_blocks,
)
