"""Threads for reading files while a node runs: a dead disk never blocks the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio
from attrs import define, field

from protocol.errors import StartFailed
from supervisor.deadlines import FILE_READ_TIMEOUT_S
from supervisor.files import reading
from supervisor.threads.text_threads import NO_THREAD

T = TypeVar("T")

THREADS_MAX = 4  # a thread at a dead disk cannot be ended; others read other disks meanwhile


@define(eq=False)
class FileThreads:
    """A `FileReader` that runs each function in a thread, within `within_s` seconds."""

    within_s: float = FILE_READ_TIMEOUT_S
    _threads: trio.CapacityLimiter = field(factory=lambda: trio.CapacityLimiter(THREADS_MAX))

    async def __call__(self, function: Callable[[], T], /) -> T:
        """Return the result of the function, or raise its error; raises `StartFailed` if it takes too long."""
        with reading.recording_paths() as paths:
            try:
                with trio.fail_after(self.within_s):
                    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._threads)
            except trio.TooSlowError as error:
                where = f"{paths[-1]} does" if paths else "files that were asked for earlier do"
                raise StartFailed(f"{where} not answer: nothing was read within {self.within_s:g} s") from error
            except RuntimeError as error:
                if str(error) == NO_THREAD:
                    raise StartFailed("the system has no thread left to read files in") from error
                raise
