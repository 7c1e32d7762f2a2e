"""The items that wait for an encoder, and the batches in which it computes them.

Equal items are computed once, for whoever wants them: each asker has a place of its own in a queue that is fair between
owners, and the first whose turn comes takes the item along for all. An item is computed for as long as one asker is
left. One that nobody wants any more leaves the queue; a batch that is being computed is aborted once nobody wants any
of its items, and its result is dropped by the engine, which cannot stop in the middle of a batch.

A batch is made when the engine is free, of those that wait then, so that nothing more urgent is behind it. If the
engine is idle, the first item waits `batch_wait_s` at the longest for others to come along.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import count

import trio
from attrs import define, evolve, field, frozen

from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.port import Encoder
from actors.engines.outcomes import ENDED
from actors.kit.fair_queue import Entry, FairQueue
from protocol.errors import (
    AskerLeft,
    BadRequest,
    DeadlineExceeded,
    EngineStuck,
    InternalError,
    RequestError,
    from_code,
)
from protocol.messages.generation import REQUEST_ID_LENGTH
from protocol.messages.media import BatchEncoded, Encode, EncodeBatch, EncodedItem, MediaForm, MediaInfo, MediaItem
from protocol.tensors import Tensor, size_bytes

log = logging.getLogger(__name__)

BATCH_BYTES_MAX = 256 * 1024 * 1024  # of pixels, half of what may be attached on a link; a larger item is a batch alone
COPIED_BYTES = 4 * 1024 * 1024  # in one turn of the event loop


@define(eq=False)
class Encoding:
    """The computation of one item, for any number of askers."""

    item: MediaItem
    asked_at: float
    places: set[Entry[Encoding]] = field(factory=set)  # of its askers in the queue, while it waits
    askers: int = 0
    alone: bool = False  # in a batch of its own, as one of its askers wants it
    batch: _Batch | None = None
    begun: trio.Event = field(factory=trio.Event)  # it is in a batch
    over: trio.Event = field(factory=trio.Event)
    released: trio.Event = field(factory=trio.Event)  # the engine holds nothing of it any more
    _result: MediaItem | None = None
    _failure: RequestError | None = None

    async def embeddings(self, waiting_s: float) -> MediaItem:
        """Wait for the item with its embeddings; raises the error that it, or its batch, ended with.

        Raises `DeadlineExceeded` if its batch has not begun after `waiting_s`.
        """
        with trio.move_on_after(waiting_s):
            await self.begun.wait()
        if not self.begun.is_set():
            raise DeadlineExceeded(f"the encoder was not free for this item within {waiting_s:g} s")
        await self.over.wait()
        if self._failure is not None:
            raise copy(self._failure)
        assert self._result is not None
        return self._result

    def end(self, outcome: MediaItem | RequestError) -> None:
        """End with embeddings or an error."""
        if isinstance(outcome, MediaItem):
            self._result = outcome
        else:
            self._failure = copy(outcome)  # without its traceback, whose frames refer to this
        self.over.set()


@define(eq=False)
class _Batch:
    id: str
    encodings: tuple[Encoding, ...]
    answered: bool = False
    left_at: float | None = None  # when the last asker of the last item left

    @property
    def items(self) -> tuple[MediaItem, ...]:
        return tuple(encoding.item for encoding in self.encodings)


@frozen
class EncodingsStatistics:
    """The numbers of distinct items at one moment, and the tokens of those that wait."""

    waiting: int
    waiting_tokens: int
    computing: int


@define(eq=False)
class Encodings:
    """The items that one encoder computes, has to compute, and has computed."""

    engine: Encoder
    limits: EncoderLimits
    cache: EmbeddingCache
    observer: EncoderObserver
    _queue: FairQueue[Encoding] = field(factory=FairQueue)  # the askers of the items that wait
    _encodings: dict[str, Encoding] = field(factory=dict)  # by digest, those that can be joined
    _waiting: dict[str, Encoding] = field(factory=dict)  # by digest, in the order in which they were asked for
    _waiting_tokens: int = 0
    _batch: _Batch | None = None  # that is in the engine
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _numbers: Iterator[int] = field(factory=lambda: count(1))

    @property
    def media(self) -> MediaInfo:
        """The items that the engine takes, and the embeddings that it makes."""
        media = self.engine.info.media
        assert media is not None, "an encoder says what it makes"
        return media

    def statistics(self) -> EncodingsStatistics:
        """Return how many items there are."""
        computing = 0 if self._batch is None else len(self._batch.encodings)
        return EncodingsStatistics(len(self._waiting), self._waiting_tokens, computing)

    # Askers --------------------------------------------------------------------------------

    def cached(self, item: MediaItem) -> MediaItem | None:
        """Return an item with embeddings that were computed before; None if there are none."""
        if (kept := self.cache.get(item.digest)) is None:
            return None
        _check_equal(item, kept)
        return evolve(item, form=kept.form, data=kept.data)

    def is_shared(self, item: MediaItem) -> bool:
        """Whether an equal item waits or is being computed."""
        return item.digest in self._encodings

    @contextmanager
    def join(self, request: Encode) -> Iterator[Encoding]:
        """Want an item while the body runs, and be one of those for whom it is computed.

        Raises `BadRequest` for an item that differs from another one with the same digest.
        """
        item = request.item
        if (encoding := self._encodings.get(item.digest)) is None:
            encoding = self._add(item)
        _check_equal(item, encoding.item)
        place = None
        if encoding.batch is None:
            self._queue.catch_up(request.owner)
            place = self._queue.add(encoding, request.owner, request.priority)
            encoding.places.add(place)
        encoding.askers += 1
        encoding.alone = encoding.alone or request.alone
        try:
            yield encoding
        finally:
            encoding.askers -= 1
            if place in encoding.places:
                encoding.places.remove(place)
                self._queue.remove(place)
            if not encoding.askers and not encoding.over.is_set():
                self._abandon(encoding)

    def _add(self, item: MediaItem) -> Encoding:
        encoding = self._encodings[item.digest] = self._waiting[item.digest] = Encoding(item, trio.current_time())
        self._waiting_tokens += item.tokens
        self._report()
        self._changed.unpark_all()
        return encoding

    def _abandon(self, encoding: Encoding) -> None:
        """Drop an item that nobody wants any more, or abort its batch if nobody wants any of that."""
        batch = encoding.batch
        if batch is None:
            self._drop_waiting(encoding)
            self._forget(encoding)
            self._changed.unpark_all()
        elif not batch.answered and not any(each.askers for each in batch.encodings):
            batch.left_at = trio.current_time()
            for each in batch.encodings:
                self._forget(each)  # no result will come
            self.engine.abort(batch.id)

    def _drop_waiting(self, encoding: Encoding) -> None:
        del self._waiting[encoding.item.digest]
        self._waiting_tokens -= encoding.item.tokens
        self._report()

    def _forget(self, encoding: Encoding) -> None:
        if self._encodings.get(encoding.item.digest) is encoding:
            del self._encodings[encoding.item.digest]

    def _report(self) -> None:
        now = self.statistics()
        self.observer.queue_changed(now.waiting, now.computing)

    # Batches -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compute batches, one after the other; raises `EngineStuck` for one that the engine does not let go."""
        self._report()
        while True:
            await self._wait_due()
            self._batch = self._next_batch()
            self._report()
            try:
                await self._compute(self._batch)
            finally:
                self._batch = None
                self._report()

    def fail_batch(self, error: RequestError) -> None:
        """Fail the items that are in the engine, at once: they may be why it is lost, and those that wait are not."""
        for encoding in () if self._batch is None else self._batch.encodings:
            self._end(encoding, error)

    async def _wait_due(self) -> None:
        """Wait until a batch is full, or its first item has waited as long as it may for others."""
        await trio.lowlevel.checkpoint()
        limits = self.limits
        while len(self._waiting) < limits.batch_max and self._waiting_tokens < limits.batch_tokens_max:
            first = next(iter(self._waiting.values()), None)
            if first is None:
                await self._changed.park()
            elif (due_at := first.asked_at + limits.batch_wait_s) > trio.current_time():
                with trio.move_on_at(due_at):
                    await self._changed.park()
            else:
                return

    def _next_batch(self) -> _Batch:
        """Return a batch of those whose turn it is; the first that does not fit any more waits for the next.

        One that shall be alone fits into no batch with others: an encoder was lost with it.
        """
        encodings: list[Encoding] = []
        tokens = size = 0
        while len(encodings) < self.limits.batch_max and (entry := self._queue.first()) is not None:
            encoding = entry.item
            if encodings and (encoding.alone or encodings[0].alone):
                break
            tokens += encoding.item.tokens
            size += len(encoding.item.data.data)
            if encodings and (tokens > self.limits.batch_tokens_max or size > BATCH_BYTES_MAX):
                break
            encodings.append(encoding)
            for place in encoding.places:
                self._queue.remove(place)
            encoding.places.clear()
            self._queue.charge(entry.owner, encoding.item.tokens)
            self._drop_waiting(encoding)
        batch = _Batch(f"{next(self._numbers):0{REQUEST_ID_LENGTH}x}", tuple(encodings))
        for encoding in encodings:
            encoding.batch = batch
            encoding.begun.set()
            self.observer.waited(trio.current_time() - encoding.asked_at)
        return batch

    async def _compute(self, batch: _Batch) -> None:
        """Have a batch computed, and end its items; returns when the engine holds nothing of it."""
        began_at, outcome = trio.current_time(), ENDED
        try:
            result = await self._ask(batch)
            batch.answered = True
            await self._settle(batch, result)
        except RequestError as error:
            outcome = error.code if batch.left_at is None else AskerLeft.code
            for encoding in batch.encodings:
                self._end(encoding, error)
        self.observer.batch_ended(batch.items, outcome, trio.current_time() - began_at)
        with trio.move_on_after(self.limits.release_s) as waiting:
            await self.engine.wait_released(batch.id)
        if waiting.cancelled_caught:
            raise EngineStuck(f"the encoder keeps a batch {self.limits.release_s} s after its end")
        if batch.left_at is not None:
            self.observer.aborted(trio.current_time() - batch.left_at)
        for encoding in batch.encodings:
            encoding.released.set()
        batch.encodings = ()  # each refers to its batch, and their tensors are not to wait for the garbage collector

    async def _ask(self, batch: _Batch) -> BatchEncoded:
        """Return the result of a batch; raises any `RequestError`, also `DeadlineExceeded` after `batch_s`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        answer = self.engine.submit(EncodeBatch(batch.id, batch.items))
        try:
            with trio.move_on_after(self.limits.batch_s):
                result = await answer.result()
                assert result is not None, "an answer that has not been abandoned has a result"
                return result
        finally:
            self.engine.abort(batch.id)
            answer.abandon()
        number = len(batch.encodings)
        raise DeadlineExceeded(f"the encoder took longer than {self.limits.batch_s:g} s for a batch of {number} items")

    async def _settle(self, batch: _Batch, result: BatchEncoded) -> None:  # noqa: ASYNC910  # a batch has an item
        """End each item of a batch with its own outcome; raises `InternalError` if they are too many or too few."""
        if len(result.outcomes) != len(batch.encodings):
            raise _fault(f"the encoder returned {len(result.outcomes)} outcomes for {len(batch.encodings)} items")
        for encoding, outcome in zip(batch.encodings, result.outcomes, strict=True):
            try:
                embedded = await self._embedded(encoding.item, outcome)
            except RequestError as error:
                self._end(encoding, error)
                continue
            self.cache.put(embedded)
            self._end(encoding, embedded)

    async def _embedded(self, item: MediaItem, outcome: EncodedItem) -> MediaItem:
        """Return an item with its embeddings; raises its own error, or `InternalError` for what is not its embeddings.

        They are copied: they outlive the batch, whose tensors may share one buffer that belongs to the engine.
        """
        await trio.lowlevel.checkpoint()
        if outcome.code:
            raise from_code(outcome.code, outcome.detail)
        _check_embeddings(item, outcome.data, self.media)
        view = outcome.data.data
        copied = bytearray()
        while len(copied) < len(view):
            copied += view[len(copied) : len(copied) + COPIED_BYTES]
            await trio.lowlevel.checkpoint()
        data = evolve(outcome.data, data=memoryview(copied).toreadonly())
        return evolve(item, form=MediaForm.EMBEDDINGS, data=data)

    def _end(self, encoding: Encoding, outcome: MediaItem | RequestError) -> None:
        self._forget(encoding)
        if not encoding.over.is_set():
            encoding.end(outcome)


def _check_equal(item: MediaItem, other: MediaItem) -> None:
    """Raise `BadRequest` if an item differs from another one of the same digest in what can be compared."""
    for name in ("modality", "grid", "tokens"):
        wanted, has = getattr(item, name), getattr(other, name)
        if wanted != has:
            raise BadRequest(f"two items have one digest; the {name} of one is {wanted}, of the other {has}")


def _check_embeddings(item: MediaItem, tensor: Tensor, media: MediaInfo) -> None:
    """Raise `InternalError` unless a tensor is the embeddings of an item; NaN in it is the engine's to know."""
    if tensor.shape != (item.tokens, media.width):
        shape = " x ".join(map(str, tensor.shape))
        raise _fault(f"the encoder made {shape} for an item of {item.tokens} tokens, {media.width} elements each")
    if tensor.dtype is not media.dtype:
        raise _fault(f"the encoder made {tensor.dtype}, where it says {media.dtype}")
    if len(tensor.data) != size_bytes(tensor):
        raise _fault(f"the encoder made {len(tensor.data)} bytes, where the shape needs {size_bytes(tensor)}")


def _fault(detail: str) -> InternalError:
    log.error("an encoder returned what it was not asked for", extra={"reason": detail})
    return InternalError(detail)
