"""The watchdog of a host: ends the host with its node, with its link, and with any of its own children.

It runs in a thread of its own, from before the engine is loaded, because loading blocks the main thread for seconds. It
polls file descriptors (sockets and pidfds) and not a parent-death signal: such a signal is tied to the forking thread,
and the host's parent is a zygote, which may die without consequence. It may never wait for the main thread, nor for the
engine: a host that hangs must end all the same, so its end is SIGKILL to the whole process group.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from actors.engines import leftover_memory
from actors.engines.host_ends import HOST_ENDS, KILLED


def print_reason(reason: str) -> None:
    """Write into the host's log why it ends."""
    with suppress(OSError):  # a node that was killed no longer reads
        print(f"{HOST_ENDS}{reason}", file=sys.stderr, flush=True)


class Watchdog:
    """Polls descriptors in a thread, and kills the process group when the process or link of one has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._poll = select.epoll()
        self._reasons: dict[int, str] = {}  # reasons by descriptor
        self._children: list[int] = []  # pidfds

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def unwatch_children(self) -> None:
        """Stop watching the children, which this process is about to end; the node and the link are still watched."""
        for pidfd in self._children:
            self._poll.unregister(pidfd)

    def watch_link(self, fd: int) -> None:
        """End the host when the other end of the socket `fd` is closed."""
        self._add(fd, select.EPOLLRDHUP, "the link to the node is closed")

    def watch_process(self, pidfd: int, name: str) -> None:
        """End the host when the process of `pidfd` has ended."""
        self._add(pidfd, select.EPOLLIN, f"{name} has ended")

    def watch_child(self, pid: int) -> None:
        """End the host when this child of it ends, until `unwatch_children`."""
        self._children.append(os.pidfd_open(pid))
        self.watch_process(self._children[-1], f"the engine's process {pid}")

    def end(self, reason: str) -> NoReturn:
        """Remove the host's folder and its shared memory, and kill every process of this group, this one included."""
        print_reason(reason)
        leftover_memory.remove(self._folder)
        os.killpg(0, signal.SIGKILL)
        raise AssertionError("no process survives SIGKILL")

    def _add(self, fd: int, events: int, reason: str) -> None:
        self._reasons[fd] = reason
        self._poll.register(fd, events)

    def _watch(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                self.end(_explained(self._reasons[fd], fd) if fd in self._children else self._reasons[fd])


def _explained(reason: str, pidfd: int) -> str:
    """Return the reason of an end by a child's end, with the signal that killed the child, if one did."""
    try:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return reason
    if ended is None or ended.si_code == os.CLD_EXITED:
        return reason
    return f"{reason}, {KILLED} {signal.Signals(ended.si_status).name}"


def start_watchdog(folder: Path, link: int, node: int) -> Watchdog:
    """Return a watchdog that already runs, on a host's link and on its node: the first thing that a host does."""
    watchdog = Watchdog(folder)
    watchdog.watch_link(link)
    watchdog.watch_process(node, "the node")
    watchdog.start()
    return watchdog
