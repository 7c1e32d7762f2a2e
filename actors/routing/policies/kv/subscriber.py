"""Prefix subscriber: the reports of a model's workers about their prefix caches, kept in the index of its router.

Each worker is followed by a task, which resumes where its link was lost. Numbers and lives are checked, since events
may be lost or repeated: after a gap comes a resync, for all of the worker's blocks. A wrong index costs a request time
and never more: nothing here can fail one. The workers of a cluster are trusted, so their reports are bounded by the
size of a message and of the index alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

import trio
from attrs import define, field

from actors.routing.policies.feed import FeedGauge, Watchable, WatchablePool
from actors.routing.policies.kv.index import PrefixIndex
from protocol.errors import PeerViolation, RequestError
from protocol.messages.cluster import engine_and_rank
from protocol.messages.kv_events import REPLY_HASHES_MAX, BlockChange, BlockEvents, WatchBlocks, check_block_events

log = logging.getLogger(__name__)

CREDIT = 256  # replies, after which a worker is asked again; a resync gets as many more as all blocks may take
RETRY_S = 0.2  # the pause after a failure; twice as long each time
RETRY_MAX_S = 10.0
FORGET_S = 60.0  # the time until a worker that has gone is forgotten
SWEEP_S = 0.005  # the pause between two parts of a sweep


@define(eq=False)
class PrefixSubscriber:
    """The subscriptions of one model: the feed of its index."""

    about: ClassVar[str] = "what workers have in their prefix caches, for policy kv"
    pool: WatchablePool
    index: PrefixIndex
    _subscriptions: dict[str, _Subscription] = field(factory=dict)  # by the engine's name

    @property
    def limits(self) -> tuple[tuple[str, float], ...]:
        """The size of the index."""
        return (("blocks", self.index.blocks_max),)

    @property
    def gauges(self) -> Sequence[FeedGauge]:
        """The gauges of the index."""
        return (
            FeedGauge(
                name="espalier_prefix_index_blocks",
                about="Blocks in the prefix index",
                read=lambda: self.index.statistics().blocks,
            ),
            FeedGauge(
                name="espalier_prefix_index_workers_unknown",
                about="Workers whose blocks the index does not have",
                read=lambda: len(self.unknown),
            ),
        )

    @property
    def unknown(self) -> frozenset[str]:
        """The names of available engines without a complete resync."""
        return frozenset(self.index.unknown)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow every worker that can be asked, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                self._update(nursery)
                task_status.started()
                while True:
                    with trio.move_on_after(FORGET_S):
                        await self.pool.wait_members_changed()
                    self._update(nursery)
        finally:
            for name in self._subscriptions:
                self.index.forget(name)
            self._subscriptions.clear()
            self.index.unknown.clear()

    def _update(self, nursery: trio.Nursery) -> None:
        """Follow new workers, and forget the workers gone for `FORGET_S`."""
        workers = {engine_and_rank(worker.full_name)[0]: worker for worker in self.pool.watchable()}
        for name, worker in workers.items():
            if name not in self._subscriptions:
                self._subscriptions[name] = subscription = _Subscription(self.index, name)
                subscription.set_worker(worker)
                nursery.start_soon(subscription.run)
        for name, subscription in tuple(self._subscriptions.items()):
            subscription.set_worker(workers.get(name))
            if subscription.gone_for_s > FORGET_S:
                subscription.end()
                del self._subscriptions[name]

    async def _sweep(self) -> None:
        """Remove retired bits from the index, a part at a time."""
        while True:
            await trio.sleep(SWEEP_S if self.index.unswept else 1.0)
            if self.index.unswept:
                self.index.sweep()


@define(eq=False)
class _Subscription:
    """The subscription to one worker, which may come and go, and its position in the worker's log."""

    index: PrefixIndex
    name: str
    worker: Watchable | None = None
    life: str = ""
    since: int = 0  # the number of the last event; 0 until the resync is complete
    ranks: int = 0  # as last reported by its engine, which may be down
    named_ranks: int = 0  # the ranks with a bit of the index in this life of their caches
    _gone_at: float | None = None
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _scope: trio.CancelScope = field(factory=trio.CancelScope)

    @property
    def gone_for_s(self) -> float:
        return 0.0 if self._gone_at is None else trio.current_time() - self._gone_at

    def set_worker(self, worker: Watchable | None) -> None:
        """Set the worker, None while it cannot be asked."""
        if worker is None and self._gone_at is None:
            self._gone_at = trio.current_time()
        if worker is not None:
            self._gone_at = None
        if worker is not self.worker:
            self.worker = worker
            self._changed.unpark_all()
        self._note_unknown()

    def _note_unknown(self) -> None:
        if self.worker is not None and not self.since:
            self.index.unknown.add(self.name)
        else:
            self.index.unknown.discard(self.name)

    def end(self) -> None:
        """Forget the worker, and end `run`."""
        self._forget()
        self.index.unknown.discard(self.name)
        self._scope.cancel(reason="the worker has gone")

    async def run(self) -> None:
        """Follow the worker, again and again."""
        retry_s = RETRY_S
        with self._scope:
            while True:
                if self.worker is None:
                    await self._changed.park()
                    continue
                number = self.since
                try:
                    await self._follow(self.worker)
                except PeerViolation as error:
                    extra = {"worker": self.name, "reason": str(error)}
                    log.warning("the blocks of a worker cannot be true", extra=extra)
                    self._forget()
                    number = self.since
                except RequestError as error:  # its engine, its node or the link is down
                    log.debug("a worker does not report its blocks: %s", error, extra={"worker": self.name})
                else:
                    if self.since != number:  # its credit is used up, or something was lost
                        retry_s = RETRY_S
                        continue
                retry_s = RETRY_S if self.since != number else min(2 * retry_s, RETRY_MAX_S)
                with trio.move_on_after(retry_s):
                    await self._changed.park()

    async def _follow(self, worker: Watchable) -> None:
        """Apply what the worker sends, until the credit of one question is used up."""
        credit = CREDIT if self.since else CREDIT + self.index.blocks_max // REPLY_HASHES_MAX
        async with worker.watch(WatchBlocks(self.life, self.since), credit) as answer:
            async for events in answer:
                assert isinstance(events, BlockEvents)  # nothing else answers a WatchBlocks
                if self._scope.cancel_called:  # the worker was forgotten in this very turn
                    return
                check_block_events(events)
                if not self._continues(events):
                    self._forget()
                    return  # a resync follows
                if worker.info is not None:
                    self.ranks = max(1, worker.info.data_parallel)
                self._apply(events)

    def _continues(self, events: BlockEvents) -> bool:
        """Whether these events follow the last ones without a gap, or begin anew."""
        if events.reset:
            return True
        if events.life != self.life:
            return False
        if not self.since:  # within a resync
            return True
        return events.number == self.since + len(events.events)

    def _apply(self, events: BlockEvents) -> None:
        if events.reset:
            self._forget()
        self.index.apply(self.name, events.events)
        if _ends_lives(events):
            self.named_ranks = 0
        if self.named_ranks < self.ranks:
            self.index.add_holders(self.name, self.ranks)
            self.named_ranks = self.ranks
        self.life, self.since = events.life, events.number
        self._note_unknown()

    def _forget(self) -> None:
        self.index.forget(self.name)
        self.life, self.since = "", 0
        self.named_ranks = 0
        self._note_unknown()


def _ends_lives(events: BlockEvents) -> bool:
    """Whether events report an empty cache, or begin a resync."""
    return events.reset or any(event.change is BlockChange.CLEARED for event in events.events)
