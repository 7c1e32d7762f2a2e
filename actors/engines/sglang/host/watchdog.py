"""Keeps a host from outliving what it belongs to: its node, its link, its own children.

A thread watches them from before the engine is loaded, because loading blocks the main thread for seconds. It watches
file descriptors only: a parent-death signal would belong to the thread that forked, and the host's parent is a zygote
that may die without consequence.
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

from actors.engines.sglang import shared_memory


def print_reason(why: str) -> None:
    """Say in the host's log why it ends."""
    with suppress(OSError):  # a node that was killed reads no more
        print(f"host ends: {why}", file=sys.stderr, flush=True)


class Watchdog:
    """Watches from a thread of its own, and ends the whole process group when something it watches is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._poll = select.epoll()
        self._why: dict[int, str] = {}
        self._children: list[int] = []

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def unwatch_children(self) -> None:
        """Let this process's children end: it is about to end them itself. The node and the link are watched on."""
        for pidfd in self._children:
            self._poll.unregister(pidfd)

    def watch_link(self, fd: int) -> None:
        """End when the other end of the socket `fd` is closed."""
        self._add(fd, select.EPOLLRDHUP, "the link to the node is closed")

    def watch_process(self, pidfd: int, name: str) -> None:
        """End when the process behind `pidfd` has ended."""
        self._add(pidfd, select.EPOLLIN, f"{name} has ended")

    def watch_child(self, pid: int) -> None:
        """End when a child of this process ends, until `release_children`."""
        self._children.append(os.pidfd_open(pid))
        self.watch_process(self._children[-1], f"the engine's process {pid}")

    def end(self, why: str) -> NoReturn:
        """Remove what would be left behind and kill every process of this group, this one included."""
        print_reason(why)
        shared_memory.remove(self._folder)
        os.killpg(0, signal.SIGKILL)
        raise AssertionError("nobody survives SIGKILL")

    def _add(self, fd: int, events: int, why: str) -> None:
        self._why[fd] = why
        self._poll.register(fd, events)

    def _watch(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                self.end(self._why[fd])


def stand(folder: Path, link: int, node: int) -> Watchdog:
    """Return a guard that already watches a host's link and its node: the first thing that a host does."""
    guard = Watchdog(folder)
    guard.watch_link(link)
    guard.watch_process(node, "the node")
    guard.start()
    return guard
