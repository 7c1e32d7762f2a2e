"""Adopts what its descendants leave behind, reaps it, and ends what is left at the end.

A process that somebody watches is left to that one: while it is not reaped, its id and that of its group are nobody
else's, so a signal to either cannot reach a stranger.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from contextlib import suppress

import trio

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
END_WITHIN_S = 0.4
END_TICK_S = 0.002
READ_BYTES = 64 * 1024

_LIBC = ctypes.CDLL(None)  # now: between a fork and what is started then, nothing must be loaded


def _opened() -> int | None:
    """Open where the kernel lists the children of the main thread: it starts them all, and adopts what they leave."""
    with suppress(OSError):  # a kernel that does not tell
        return os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
    return None


_CHILDREN = _opened()  # now: later there may be no descriptor to be had
watched_pids: set[int] = set()  # the ids of processes that somebody watches and reaps


def become_subreaper() -> None:
    """Become the parent of whatever a descendant leaves without one, as process 1 of a container is anyway."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; a program that is started next inherits the wish."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def exit_if_orphaned(pipe: int) -> None:
    """End this process if the reading end of `pipe` is gone: its parent had died before the kernel was asked."""
    watched = select.poll()
    watched.register(pipe, 0)
    if watched.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


async def run() -> None:
    """Reap every child that has ended and that nobody owns, for ever."""
    with trio.open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            try:
                reap()
            except OSError:  # the next child to end has us try again; the node must not fall because of this one
                log.exception("children that ended could not be reaped")


def reap() -> None:
    """Reap every child that has ended and that nobody owns; takes no descriptor."""
    for pid in children():
        if pid not in watched_pids:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def kill_all() -> int:
    """Kill and reap every child that is left, whatever it is, and return how many there were.

    What a child leaves behind when it dies becomes a child of this process in its turn, and ends as well; only what not
    even SIGKILL ends, because it hangs inside the kernel, is not waited for any longer than `END_WITHIN_S`.
    """
    ended = 0
    give_up_at = time.monotonic() + END_WITHIN_S
    while (left := children()) and time.monotonic() < give_up_at:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                ended += os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(END_TICK_S)
    return ended


def children() -> list[int]:
    """Return the ids of this process's children, those that have ended and are not reaped included."""
    text = b""
    while _CHILDREN is not None and (read := os.pread(_CHILDREN, READ_BYTES, len(text))):
        text += read
    return [int(pid) for pid in text.split()]
