"""A bounded queue in front of a slow sink, and the one thread that writes to it: logging never blocks the event loop.

A log goes to a stopped terminal, an unread pipe, or a full or hanging disk. A thread waits for it, so that the event
loop does not. Items without room in the queue are dropped and counted, and a notice in their place gives their number.

Several processes may write to one pipe, so the thread writes whole lines, at most as many bytes at a time as the
kernel writes atomically. The queue is safe to use from any thread and from a finalizer.

A thread that wakes for each line takes the interpreter from the event loop each time. So a writer may have a pause: a
single line is written at once, and further lines within the pause are written together at its end.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO, TypeAlias

from attrs import define, field

log = logging.getLogger(__name__)

LINES_MAX = 10_000
BYTES_MAX = 4 * 1024 * 1024
CHUNK_BYTES = select.PIPE_BUF  # up to this size a write to a pipe is atomic

Sink: TypeAlias = Callable[[bytes], None]
"""Writes all of some bytes, and may block; raises `OSError`."""

_Gap: TypeAlias = tuple[int, int]  # dropped items, and their bytes
_NONE: _Gap = (0, 0)


def start_daemon_thread(run: Callable[[], None]) -> None:
    """Start a thread that the process does not wait for at its exit."""
    threading.Thread(target=run, name="writer", daemon=True).start()


def lost_lines(items: int, _: int) -> bytes:
    """Return the notice in place of dropped lines."""
    return f"{items} log line{'s were' if items != 1 else ' was'} lost\n".encode()


def ignore(error: OSError | ValueError | None) -> None:
    """Ignore an error."""


@define(eq=False)
class QueuedWriter:
    """A bounded queue of bytes, and a thread that writes them to `sink` in order.

    Once everything is written, the thread sleeps for `pause_s` unless `flush` wakes it; new items wait meanwhile.
    `notice` makes the text in place of dropped items, from their number and their bytes. `on_failure` is called in the
    thread with the first error of writes, and with None once they succeed again.
    """

    sink: Sink
    items_max: int = LINES_MAX
    bytes_max: int = BYTES_MAX
    notice: Callable[[int, int], bytes] = lost_lines
    on_failure: Callable[[OSError | ValueError | None], None] = ignore
    start: Callable[[Callable[[], None]], None] = start_daemon_thread
    chunk_bytes: int = CHUNK_BYTES
    pause_s: float = 0.0
    lost_items: int = 0  # in all
    lost_bytes: int = 0
    queued_bytes: int = 0  # bytes of the present write included
    failing: bool = False
    _queue: deque[tuple[bytes, _Gap]] = field(factory=deque)  # each item with the gap just before it
    _gap: _Gap = _NONE  # dropped after the last queued item
    _writing: bool = False
    _running: bool = False  # the thread
    _changed: threading.Condition = field(factory=threading.Condition)  # reentrant: a finalizer may log at any moment
    _hurried: threading.Event = field(factory=threading.Event)  # ends the pause

    def put(self, data: bytes) -> bool:
        """Queue an item; return whether there was room for it."""
        with self._changed:
            queued = self.queued_bytes
            if len(self._queue) >= self.items_max or (queued and queued + len(data) > self.bytes_max):
                self._drop((1, len(data)))
                return False
            self._queue.append((data, self._gap))
            self.queued_bytes += len(data)
            self._gap = _NONE
            if not self._running:
                with suppress(RuntimeError):  # the system has no thread left: the next item tries again
                    self.start(self._run)
                    self._running = True
            self._changed.notify_all()
            return True

    @property
    def idle(self) -> bool:
        """Whether there is nothing to write; while writes fail, a notice of dropped items waits."""
        return not self._queue and not self._writing and (self.failing or self._gap == _NONE)

    def flush(self, within_s: float) -> bool:
        """Block until everything has been written or dropped, for at most `within_s`; return whether it has."""
        self._hurried.set()
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, within_s)

    def _drop(self, lost: _Gap) -> None:
        self.lost_items += lost[0]
        self.lost_bytes += lost[1]
        self._gap = _sum(self._gap, lost)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.idle)
                data, taken, noticed = self._take()
                self._writing = True
            error = self._write(data)
            with self._changed:
                self.queued_bytes -= taken[1]
                if error is not None:
                    self._gap = _sum(noticed, self._gap)
                    self._drop(taken)
                changed, self.failing = self.failing != (error is not None), error is not None
            if changed:
                self._report(error)
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                idle = self.idle
            if idle and self.pause_s:
                self._hurried.wait(self.pause_s)
                self._hurried.clear()

    def _take(self) -> tuple[bytes, _Gap, _Gap]:
        """Remove a chunk from the queue; return it with its notices, its size, and the gap in its notices."""
        pieces: list[bytes] = []
        taken, noticed = _NONE, _NONE
        while self._queue and (not pieces or taken[1] + len(self._queue[0][0]) <= self.chunk_bytes):
            data, gap = self._queue.popleft()
            if gap != _NONE:
                pieces.append(self._notice(gap))
            pieces.append(data)
            taken, noticed = _sum(taken, (1, len(data))), _sum(noticed, gap)
        if not self._queue and self._gap != _NONE:
            pieces.append(self._notice(self._gap))
            noticed, self._gap = _sum(noticed, self._gap), _NONE
        return b"".join(pieces), taken, noticed

    def _notice(self, gap: _Gap) -> bytes:
        try:
            return self.notice(*gap)
        except Exception:  # noqa: BLE001  # it cannot be logged here: a logger may wait for this thread
            return lost_lines(*gap)

    def _report(self, error: OSError | ValueError | None) -> None:
        try:
            self.on_failure(error)
        except Exception:
            log.exception("a bug in what is done when a log cannot be written")

    def _write(self, data: bytes) -> OSError | ValueError | None:
        try:
            self.sink(data)
        except (OSError, ValueError) as error:  # a ValueError: the file has been closed
            return error
        return None


def _sum(left: _Gap, right: _Gap) -> _Gap:
    return left[0] + right[0], left[1] + right[1]


def file_sink(out: TextIO) -> Sink:
    """Return a sink that bypasses the buffer of `out`: its lock must not be held when the interpreter exits."""
    try:
        fd = out.fileno()
    except (OSError, AttributeError):  # not a file
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
        except BlockingIOError:  # a process that shares the file has made it non-blocking
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
