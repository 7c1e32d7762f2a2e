"""The queue of an encoder: its waiting items, and their batches.

Equal items are one *job*, computed once for all their askers: each asker has its own entry in a queue that is fair
between owners, and the first entry in turn takes the job along for all. A waiting job without askers leaves the queue.
A batch without askers is aborted: the engine cannot stop in the middle of it, and drops the result.

A batch is made of the waiting jobs when the engine is free, so that nothing more urgent is behind it. If the engine is
idle, the first job waits `batch_wait_s` at the longest for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import trio
from attrs import define, evolve, field, frozen

from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.embeddings import check_equal, embedded, encoder_fault
from actors.engines.encoding.job import EncodeJob, JobBatch
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.port import Encoder
from actors.engines.outcomes import ENDED
from actors.kit.fair_queue import FairQueue
from protocol.errors import AskerLeft, DeadlineExceeded, EngineStuck, RequestError
from protocol.messages.generation import REQUEST_ID_LENGTH
from protocol.messages.media import EmbeddingBatch, Encode, EncodeBatch, MediaInfo, MediaItem

BATCH_BYTES_MAX = 256 * 1024 * 1024
"""The most pixels of a batch, half of the bytes attached on a link at most; a larger item is a batch alone."""


@frozen
class EncodeQueueStatistics:
    """The numbers of jobs at one moment, and the tokens of the waiting ones."""

    waiting: int
    waiting_tokens: int
    computing: int


@define(eq=False)
class EncodeQueue:
    """The jobs of one encoder, and the embeddings that it has computed.

    The way of a job:

        waiting -> in the batch -> ended -> released
           | the last asker leaves    | the last asker of the batch leaves
        dropped                    aborted -> released
    """

    engine: Encoder
    limits: EncoderLimits
    cache: EmbeddingCache
    observer: EncoderObserver
    _queue: FairQueue[EncodeJob] = field(factory=FairQueue)  # one entry for each asker of a waiting job
    _jobs: dict[str, EncodeJob] = field(factory=dict)  # by digest, the jobs that askers can join
    _waiting: dict[str, EncodeJob] = field(factory=dict)  # by digest, in the order of arrival
    _waiting_tokens: int = 0
    _batch: JobBatch | None = None  # the batch in the engine
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _numbers: Iterator[int] = field(factory=lambda: count(1))

    @property
    def media(self) -> MediaInfo:
        """The engine's media: accepted items, and the form of the embeddings."""
        media = self.engine.info.media
        assert media is not None, "an encoder has a `media`"
        return media

    def statistics(self) -> EncodeQueueStatistics:
        """Return the numbers of jobs."""
        computing = 0 if self._batch is None else len(self._batch.jobs)
        return EncodeQueueStatistics(len(self._waiting), self._waiting_tokens, computing)

    # Askers --------------------------------------------------------------------------------

    def cached(self, item: MediaItem) -> MediaItem | None:
        """Return an item with embeddings that were computed before; None if there are none."""
        if (kept := self.cache.get(item.digest)) is None:
            return None
        check_equal(item, kept)
        return evolve(item, form=kept.form, data=kept.data)

    def is_shared(self, item: MediaItem) -> bool:
        """Whether an equal item waits or is being computed."""
        return item.digest in self._jobs

    @contextmanager
    def join(self, request: Encode) -> Iterator[EncodeJob]:
        """Be one of an item's askers while the body runs.

        Raises `BadRequest` for an item that differs from another one with the same digest.
        """
        item = request.item
        if (job := self._jobs.get(item.digest)) is None:
            job = self._add(item)
        check_equal(item, job.item)
        entry = None
        if job.batch is None:
            self._queue.catch_up(request.owner)
            entry = self._queue.add(job, request.owner, request.priority)
            job.entries.add(entry)
        job.askers += 1
        job.alone = job.alone or request.alone
        try:
            yield job
        finally:
            job.askers -= 1
            if entry in job.entries:
                job.entries.remove(entry)
                self._queue.remove(entry)
            if not job.askers and not job.over.is_set():
                self._abandon(job)

    def _add(self, item: MediaItem) -> EncodeJob:
        job = self._jobs[item.digest] = self._waiting[item.digest] = EncodeJob(item, trio.current_time())
        self._waiting_tokens += item.tokens
        self._report()
        self._changed.unpark_all()
        return job

    def _abandon(self, job: EncodeJob) -> None:
        """Drop a job without askers, or abort its batch if no job of the batch has any."""
        batch = job.batch
        if batch is None:
            self._drop_waiting(job)
            self._forget(job)
            self._changed.unpark_all()
        elif not batch.answered and not any(other.askers for other in batch.jobs):
            batch.left_at = trio.current_time()
            for other in batch.jobs:
                self._forget(other)  # no result will come
            self.engine.abort(batch.id)

    def _drop_waiting(self, job: EncodeJob) -> None:
        del self._waiting[job.item.digest]
        self._waiting_tokens -= job.item.tokens
        self._report()

    def _forget(self, job: EncodeJob) -> None:
        if self._jobs.get(job.item.digest) is job:
            del self._jobs[job.item.digest]

    def _report(self) -> None:
        now = self.statistics()
        self.observer.queue_changed(now.waiting, now.computing)

    # Batches -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compute batches, one after the other; raises `EngineStuck` for a batch that the engine does not release."""
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
        """Fail the jobs in the engine, at once: they may be why the engine is lost, and the waiting ones are not."""
        for job in () if self._batch is None else self._batch.jobs:
            self._end(job, error)

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

    def _next_batch(self) -> JobBatch:
        """Return a batch of the next jobs in turn; the first that does not fit waits for the next batch.

        A job to be `alone` fits into no batch with others: an encoder was lost with it.
        """
        jobs: list[EncodeJob] = []
        tokens = size = 0
        while len(jobs) < self.limits.batch_max and (entry := self._queue.first()) is not None:
            job = entry.item
            if jobs and (job.alone or jobs[0].alone):
                break
            tokens += job.item.tokens
            size += len(job.item.data.data)
            if jobs and (tokens > self.limits.batch_tokens_max or size > BATCH_BYTES_MAX):
                break
            jobs.append(job)
            for queued in job.entries:
                self._queue.remove(queued)
            job.entries.clear()
            self._queue.charge(entry.owner, job.item.tokens)
            self._drop_waiting(job)
        batch = JobBatch(f"{next(self._numbers):0{REQUEST_ID_LENGTH}x}", tuple(jobs))
        for job in jobs:
            job.batch = batch
            job.begun.set()
            self.observer.waited(trio.current_time() - job.asked_at)
        return batch

    async def _compute(self, batch: JobBatch) -> None:
        """Have a batch computed, and end its jobs; returns when the engine has released it."""
        began_at, outcome = trio.current_time(), ENDED
        try:
            result = await self._ask(batch)
            batch.answered = True
            await self._settle(batch, result)
        except RequestError as error:
            outcome = error.code if batch.left_at is None else AskerLeft.code
            for job in batch.jobs:
                self._end(job, error)
        self.observer.batch_ended(batch.items, outcome, trio.current_time() - began_at)
        with trio.move_on_after(self.limits.release_s) as waiting:
            await self.engine.wait_released(batch.id)
        if waiting.cancelled_caught:
            raise EngineStuck(f"the encoder keeps a batch {self.limits.release_s} s after its end")
        if batch.left_at is not None:
            self.observer.aborted(trio.current_time() - batch.left_at)
        for job in batch.jobs:
            job.released.set()
        # Each job refers to its batch: a circle, in which the tensors would wait for the garbage collector.
        batch.jobs = ()

    async def _ask(self, batch: JobBatch) -> EmbeddingBatch:
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
        number = len(batch.jobs)
        raise DeadlineExceeded(f"the encoder took longer than {self.limits.batch_s:g} s for a batch of {number} items")

    async def _settle(self, batch: JobBatch, result: EmbeddingBatch) -> None:  # noqa: ASYNC910  # a batch has an item
        """End each job of a batch with its own outcome; raises `InternalError` if there are too many or too few."""
        if len(result.outcomes) != len(batch.jobs):
            raise encoder_fault(f"the encoder returned {len(result.outcomes)} outcomes for {len(batch.jobs)} items")
        for job, outcome in zip(batch.jobs, result.outcomes, strict=True):
            try:
                made = await embedded(job.item, outcome, self.media)
            except RequestError as error:
                self._end(job, error)
                continue
            self.cache.put(made)
            self._end(job, made)

    def _end(self, job: EncodeJob, outcome: MediaItem | RequestError) -> None:
        self._forget(job)
        if not job.over.is_set():
            job.end(outcome)
