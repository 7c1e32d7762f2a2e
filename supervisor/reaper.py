"""Adopts what its descendants leave behind, reaps it, and ends what is left at the end."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import trio

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_WITHIN_S = 0.4
END_TICK_S = 0.002

_LIBC = ctypes.CDLL(None)  # now: between a fork and what is started then, nothing must be loaded


def adopt() -> None:
    """Become the parent of whatever a descendant leaves without one, as process 1 of a container is anyway."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; a program that is started next inherits the wish."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_without(pipe: int) -> None:
    """End this process if the reading end of `pipe` is gone: its parent had died before the kernel was asked."""
    watched = select.poll()
    watched.register(pipe, 0)
    if watched.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


async def run() -> None:
    """Reap every child that has ended, for ever; whoever watches one does so by its pidfd, which stays readable."""
    with trio.open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            for pid in list(_children()):
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222  # it does not wait


def end_all() -> int:
    """Kill and reap every child that is left, whatever it is, and return how many there were.

    What a child leaves behind when it dies becomes a child of this process in its turn, and ends as well; only what not
    even SIGKILL ends, because it hangs inside the kernel, is not waited for any longer than `END_WITHIN_S`.
    """
    ended = 0
    give_up_at = time.monotonic() + END_WITHIN_S
    while (left := list(_children())) and time.monotonic() < give_up_at:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                ended += os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(END_TICK_S)
    return ended


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            yield from map(int, (task / "children").read_text().split())
