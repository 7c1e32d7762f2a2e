"""Adopt orphaned descendants, reap them, and kill the remaining ones when this process ends.

The process is a *subreaper*: orphans of a descendant become its children. So no process of an engine can escape, and
ended processes without a `Process` are reaped here, as init would do.

A pid in `watched_pids` is never reaped here: until its `Process` reaps it, the kernel reuses neither its id nor its
group's, so a signal sent to either reaches the right process.
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
KILL_WITHIN_S = 0.4
KILL_TICK_S = 0.002
READ_BYTES = 64 * 1024

# Loaded at import: between a fork and an exec nothing may be loaded.
_LIBC = ctypes.CDLL(None)


def _open_children() -> int | None:
    """Open the kernel's list of the main thread's children: that thread starts them all, and adopts orphans."""
    with suppress(OSError):  # a kernel without this list
        return os.open(f"/proc/self/task/{os.getpid()}/children", os.O_RDONLY | os.O_CLOEXEC)
    return None


# Opened at import: later there may be no descriptor left.
_CHILDREN = _open_children()
watched_pids: set[int] = set()  # the ids of processes with a `Process`


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, as process 1 of a container is anyway."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; this outlasts an exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def exit_if_orphaned(pipe: int) -> None:
    """Kill this process if the reading end of `pipe` is closed: its parent died before `die_with_parent`."""
    poll = select.poll()
    poll.register(pipe, 0)
    if poll.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


async def run() -> None:
    """Reap every child that has ended and has no `Process`, until cancelled."""
    with trio.open_signal_receiver(signal.SIGCHLD) as signals:
        async for _ in signals:
            try:
                reap()
            except OSError:  # tried again at the next end of a child; it must not end the node
                log.exception("children that ended could not be reaped")


def reap() -> None:
    """Reap every child that has ended and has no `Process`; needs no file descriptor."""
    for pid in child_pids():
        if pid not in watched_pids:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def kill_all() -> int:
    """Kill and reap all remaining children, and return their number; blocks for up to `KILL_WITHIN_S`.

    The children of a killed child become children of this process, and are killed as well. A process hung inside the
    kernel is not ended by SIGKILL, and not waited for any longer.
    """
    ended = 0
    give_up_at = time.monotonic() + KILL_WITHIN_S
    while (left := child_pids()) and time.monotonic() < give_up_at:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                ended += os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(KILL_TICK_S)
    return ended


def child_pids() -> list[int]:
    """Return the ids of this process's children, unreaped ones included."""
    text = b""
    while _CHILDREN is not None and (read := os.pread(_CHILDREN, READ_BYTES, len(text))):
        text += read
    return [int(pid) for pid in text.split()]
