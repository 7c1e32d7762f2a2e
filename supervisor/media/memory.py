"""The memory of decoded images and videos in the node: mapped without a copy, and freed outside the event loop.

A mapping costs nothing until it is read. The release of a hundred megabytes takes tens of milliseconds in the kernel,
and would block the event loop. So the pages of a tensor are dropped piece by piece when its lease ends, and its file is
closed in a thread after its last view. Until then an engine's process may open the file, so pixels get there without a
copy. A small tensor is copied, since each mapping needs descriptors.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections import deque
from contextlib import suppress

import trio
from attrs import define, field

from actors.engines.shared_tensors import SealedMapping
from protocol.tensors import Tensor

COPIED_BYTES_MAX = 2 * 1024 * 1024  # a copied tensor: about half a millisecond
CLOSED_IN_PLACE_BYTES_MAX = 8 * 1024 * 1024  # a tensor freed with its last view: some 3 ms
DROPPED_BYTES = 4 * 1024 * 1024  # pages dropped in one turn


@define(eq=False)
class MediaMemory:
    """Maps files, and frees them in a task of its own."""

    _dropped: deque[mmap.mmap] = field(factory=deque)
    _closing: deque[int] = field(factory=deque)  # descriptors
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _token: trio.lowlevel.TrioToken | None = None  # while `run` runs

    def take(self, descriptor: int, size_bytes: int) -> memoryview:
        """Return the bytes of a sealed file, and take over its descriptor, even if it raises `OSError`."""
        if size_bytes <= COPIED_BYTES_MAX:
            try:
                return memoryview(os.pread(descriptor, size_bytes, 0))
            finally:
                os.close(descriptor)
        try:
            mapping = SealedMapping.of(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        # The memory lasts as long as this descriptor is open: much memory is closed later, in a thread.
        close = self.close_later if size_bytes > CLOSED_IN_PLACE_BYTES_MAX else os.close
        weakref.finalize(mapping, close, descriptor).atexit = False
        return memoryview(mapping)

    def release(self, tensor: Tensor) -> None:
        """Drop the pages of a tensor after its lease; a later read gets them again."""
        mapping = tensor.data.obj
        if isinstance(mapping, mmap.mmap):
            self._dropped.append(mapping)
            self._wake()

    def close_later(self, descriptor: int) -> None:
        """Close a descriptor of much memory; callable in any thread."""
        self._closing.append(descriptor)
        self._wake()

    async def run(self) -> None:
        """Free what is to be freed, until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        limiter = trio.CapacityLimiter(1)
        try:
            while True:
                while self._dropped or self._closing:  # either may grow during work on the other
                    if self._dropped:
                        await _drop_pages(self._dropped.popleft())
                    else:
                        await trio.to_thread.run_sync(os.close, self._closing[0], limiter=limiter)
                        self._closing.popleft()  # not before: a cancellation may come before the thread begins
                await self._changed.park()
        finally:
            self._token = None
            self._dropped.clear()
            while self._closing:
                os.close(self._closing.popleft())

    def _wake(self) -> None:
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._changed.unpark_all, idempotent=True)


async def _drop_pages(mapping: mmap.mmap) -> None:
    size = math.ceil(len(mapping) / mmap.PAGESIZE) * mmap.PAGESIZE
    for begin in range(0, size, DROPPED_BYTES):
        mapping.madvise(mmap.MADV_DONTNEED, begin, min(DROPPED_BYTES, len(mapping) - begin))
        await trio.lowlevel.checkpoint()
