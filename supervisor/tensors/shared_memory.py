"""The shared memory of a node and the processes of its engines: its limit, and its end.

A region is open from the copying of its tensors until its call is over or its lease has passed; a mapping of another
process's region is kept as long as any message refers to its bytes. Both end with the close of a descriptor, here or,
at the death of this process, by the kernel. The last close of much memory takes tens of milliseconds, so a thread does
it.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

import trio
from attrs import define, field, frozen

from actors.engines.shared_tensors import Region, SealedMapping, new_region, region_bytes
from protocol.byte_budget import ByteBudget
from protocol.tensors import Tensor
from supervisor.links.waiting import taken_share

CLOSED_AT_ONCE_BYTES = 4 * 1024 * 1024  # closed in the event loop, within a millisecond
DESCRIPTOR_BYTES = 1024 * 1024  # the least count of a region, so that the limit bounds their number, too


@frozen
class SharedStatistics:
    """The open regions, the mappings of other processes' regions, and the bytes of both.

    `taken_bytes` of the limit belong to running calls; other processes may have mapped their regions.
    """

    regions: int = 0
    region_bytes: int = 0
    mappings: int = 0
    mapped_bytes: int = 0
    taken_bytes: int = 0
    waiting: int = 0


@frozen
class Copied:
    """The description of tensors in a region, and the region itself, which may be closed early."""

    tensors: Sequence[Tensor]
    region: Region
    memory: SharedMemory

    def close(self) -> None:
        """Close the region for other processes; idempotent."""
        self.memory.close(self.region)


@define(eq=False)
class SharedMemory:
    """The regions and mappings of a node; regions beyond `bytes_max` wait."""

    bytes_max: int = 512 * 1024 * 1024
    _budget: ByteBudget = field(init=False)
    _regions: dict[int, int] = field(factory=dict, init=False)  # sizes by descriptor
    _mappings: dict[int, int] = field(factory=dict, init=False)  # the same
    _closing: deque[int] = field(factory=deque, init=False)  # descriptors
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)
    _token: trio.lowlevel.TrioToken | None = field(default=None, init=False)  # while `run` runs
    _runners: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._budget = ByteBudget(self.bytes_max)

    def statistics(self) -> SharedStatistics:
        """Return the counts at this moment."""
        return SharedStatistics(
            regions=len(self._regions),
            region_bytes=sum(self._regions.values()),
            mappings=len(self._mappings),
            mapped_bytes=sum(self._mappings.values()),
            taken_bytes=self._budget.taken_bytes,
            waiting=self._budget.waiting,
        )

    def can_hold(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether a region with these tensors is within the limit."""
        return _counted_bytes(tensors) <= self.bytes_max

    @asynccontextmanager
    async def copied(self, tensors: Sequence[Tensor]) -> AsyncIterator[Copied]:
        """Copy tensors into a region once there is room for it, and free it when the body ends.

        Other tasks run after each piece. Raises `Overloaded` if the system has neither memory nor descriptors.
        """
        size = _counted_bytes(tensors)
        share = await taken_share(lambda on_taken: self._budget.share(size, on_taken))
        try:
            region = new_region()
            self._regions[region.descriptor] = region_bytes(tensors)
            try:
                for _ in region.write(tensors):
                    await trio.lowlevel.checkpoint()
                yield Copied(region.describe(tensors), region, self)
            finally:
                self.close(region)
        finally:
            share.give_back()

    def keep(self, mapping: SealedMapping) -> None:
        """Count a mapping, and close its descriptor after the last reference to its bytes."""
        self._mappings[mapping.descriptor] = len(mapping)
        weakref.finalize(mapping, self._unmapped, mapping.descriptor, len(mapping)).atexit = False

    def close(self, region: Region) -> None:
        """Close a region for other processes; idempotent."""
        if (descriptor := region.release()) >= 0:
            del self._regions[descriptor]
            self._close(descriptor, region.size)

    async def run(self) -> None:
        """Close the descriptors of much memory in a thread, until cancelled; several runs may overlap."""
        self._token = trio.lowlevel.current_trio_token()
        self._runners += 1
        limiter = trio.CapacityLimiter(1)
        try:
            while True:
                while self._closing:
                    await trio.to_thread.run_sync(self._close_one, limiter=limiter)
                await self._changed.park()
        finally:
            self._runners -= 1
            if not self._runners:
                self._token = None
                while self._closing:
                    self._close_one()

    def _unmapped(self, descriptor: int, size: int) -> None:
        """Close the descriptor of a collected mapping; callable in any thread."""
        del self._mappings[descriptor]
        self._close(descriptor, size)

    def _close(self, descriptor: int, size: int) -> None:
        token = self._token
        if size <= CLOSED_AT_ONCE_BYTES or token is None:
            os.close(descriptor)
            return
        self._closing.append(descriptor)
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(self._changed.unpark_all, idempotent=True)

    def _close_one(self) -> None:
        with suppress(IndexError):  # another thread has closed it
            os.close(self._closing.popleft())


def _counted_bytes(tensors: Iterable[Tensor]) -> int:
    return max(region_bytes(tensors), DESCRIPTOR_BYTES)
