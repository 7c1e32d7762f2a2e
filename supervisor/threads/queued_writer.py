"""A bounded queue in front of a slow place, and one thread that writes to it: whoever logs never waits.

A log goes to a terminal that may be stopped, a pipe that nobody reads, a disk that is full or hangs. The thread waits
for it, and the event loop does not. What finds no room in the queue is dropped and counted, and a notice stands in its
place.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO, TypeAlias

from attrs import define, field

LINES_MAX = 10_000
BYTES_MAX = 4 * 1024 * 1024
CHUNK_BYTES = select.PIPE_BUF  # of whole lines: several processes may write to one pipe, which keeps so many together

Sink: TypeAlias = Callable[[bytes], None]
"""Writes all of some bytes, and may wait; raises `OSError`."""

_Gap: TypeAlias = tuple[int, int]  # items that were lost, and their bytes
_NONE: _Gap = (0, 0)


def start_daemon_thread(run: Callable[[], None]) -> None:
    """Start a thread that the process does not wait for when it ends."""
    threading.Thread(target=run, name="writer", daemon=True).start()


def lost_lines(items: int, _: int) -> bytes:
    """Return what stands where lines were lost."""
    return f"{items} log line{'s were' if items != 1 else ' was'} lost\n".encode()


def ignore(error: OSError | ValueError | None) -> None:
    """Take no notice of whether writing works."""


@define(eq=False)
class QueuedWriter:
    """A bounded queue of bytes, and the thread that takes them to `sink`, oldest first.

    `notice` makes what stands in the place of items that were dropped, from how many and how many bytes they were.
    `on_failure` is called in the thread with the error when writing begins to fail, and with None once it works again.
    """

    sink: Sink
    items_max: int = LINES_MAX
    bytes_max: int = BYTES_MAX
    notice: Callable[[int, int], bytes] = lost_lines
    on_failure: Callable[[OSError | ValueError | None], None] = ignore
    start: Callable[[Callable[[], None]], None] = start_daemon_thread
    chunk_bytes: int = CHUNK_BYTES
    lost_items: int = 0  # of all time
    lost_bytes: int = 0
    failing: bool = False
    _queue: deque[tuple[bytes, _Gap]] = field(factory=deque)  # each with what was lost before it
    _bytes: int = 0  # in the queue, and in the thread's hands
    _gap: _Gap = _NONE  # lost behind all that is queued
    _writing: bool = False
    _runs: bool = False
    _changed: threading.Condition = field(factory=threading.Condition)  # reentrant: a finalizer may log at any moment

    def put(self, data: bytes) -> bool:
        """Queue something to be written; return whether there was room for it."""
        with self._changed:
            if len(self._queue) >= self.items_max or (self._bytes and self._bytes + len(data) > self.bytes_max):
                self._lose((1, len(data)))
                return False
            self._queue.append((data, self._gap))
            self._bytes += len(data)
            self._gap = _NONE
            if not self._runs:
                with suppress(RuntimeError):  # the system has no thread left: what comes next tries again
                    self.start(self._run)
                    self._runs = True
            self._changed.notify_all()
            return True

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write: a notice of what was lost waits until writing works."""
        return not self._queue and not self._writing and (self.failing or self._gap == _NONE)

    def flush(self, within_s: float) -> bool:
        """Wait until all has been written or lost, for at most so long; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, within_s)

    def _lose(self, lost: _Gap) -> None:
        self.lost_items += lost[0]
        self.lost_bytes += lost[1]
        self._gap = _sum(self._gap, lost)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.idle)
                data, taken, told = self._take()
                self._writing = True
            error = self._written(data)
            with self._changed:
                self._bytes -= taken[1]
                if error is not None:
                    self._gap = _sum(told, self._gap)
                    self._lose(taken)
                changed, self.failing = self.failing != (error is not None), error is not None
            if changed:
                self.on_failure(error)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _take(self) -> tuple[bytes, _Gap, _Gap]:
        """Return a chunk of what is queued with notices of what was lost, how much it is, and what it tells of."""
        pieces: list[bytes] = []
        taken, told = _NONE, _NONE
        while self._queue and (not pieces or taken[1] + len(self._queue[0][0]) <= self.chunk_bytes):
            data, gap = self._queue.popleft()
            pieces += [self.notice(*gap)] * (gap != _NONE) + [data]
            taken, told = _sum(taken, (1, len(data))), _sum(told, gap)
        if not self._queue and self._gap != _NONE:
            pieces.append(self.notice(*self._gap))
            told, self._gap = _sum(told, self._gap), _NONE
        return b"".join(pieces), taken, told

    def _written(self, data: bytes) -> OSError | ValueError | None:
        try:
            self.sink(data)
        except (OSError, ValueError) as error:  # a ValueError is a file that has been closed
            return error
        return None


def _sum(one: _Gap, other: _Gap) -> _Gap:
    return one[0] + other[0], one[1] + other[1]


def file_sink(out: TextIO) -> Sink:
    """Return what writes to a file of this process past its buffer, whose lock must not be held when Python ends."""
    try:
        fd = out.fileno()
    except (OSError, AttributeError):  # it is no file
        return lambda data: _write_text(out, data)
    return lambda data: _write_all(fd, data)


def _write_text(out: TextIO, data: bytes) -> None:
    out.write(data.decode())
    out.flush()


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process has made it so for all who share it
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
