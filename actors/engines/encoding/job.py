"""The computation of one item for all its askers, and the batch of such computations."""

from __future__ import annotations

from copy import copy

import trio
from attrs import define, field

from actors.kit.fair_queue import Entry
from protocol.errors import DeadlineExceeded, RequestError
from protocol.messages.media import MediaItem


@define(eq=False)
class EncodeJob:
    """The computation of one item, for any number of askers."""

    item: MediaItem
    asked_at: float
    entries: set[Entry[EncodeJob]] = field(factory=set)  # one for each asker, while the job waits
    askers: int = 0
    alone: bool = False  # whether an asker wants a batch of its own for it
    batch: JobBatch | None = None
    begun: trio.Event = field(factory=trio.Event)  # set once it is in a batch
    over: trio.Event = field(factory=trio.Event)
    released: trio.Event = field(factory=trio.Event)  # set once the engine has released the batch
    _result: MediaItem | None = None
    _failure: RequestError | None = None

    async def embeddings(self, waiting_s: float) -> MediaItem:
        """Wait for the item with its embeddings; raises the error of the item or of its batch.

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
            # A copy has no traceback, whose frames would refer to this job.
            self._failure = copy(outcome)
        self.over.set()


@define(eq=False)
class JobBatch:
    """The jobs that are computed together."""

    id: str
    jobs: tuple[EncodeJob, ...]
    answered: bool = False
    left_at: float | None = None  # when the last asker of its last job left

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The items of its jobs."""
        return tuple(job.item for job in self.jobs)
