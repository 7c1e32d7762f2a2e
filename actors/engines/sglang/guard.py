"""Keeps a host from outliving what it belongs to: its node, its link, its own children.

A thread watches them from before the engine is loaded, because loading blocks the main thread for seconds. It watches
file descriptors only: a parent-death signal would belong to the thread that forked, and the host's parent is a zygote
that may die without consequence.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # the kernel's own place, not a temporary file of ours
SHARED_NAMES_FILE = "shared-memory"  # in a host's folder: the names that outlive its processes, one a line


class Guard:
    """Watches from a thread of its own, and ends the whole process group when something it watches is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._poll = select.epoll()
        self._why: dict[int, str] = {}
        self._off = False

    def start(self) -> None:
        """Watch from now on."""
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def stop(self) -> None:
        """Watch no more: this process is about to end by itself, and its children before it."""
        self._off = True

    def watch_link(self, fd: int) -> None:
        """End when the other end of the socket `fd` is closed."""
        self._add(fd, select.EPOLLRDHUP, "the link to the node is closed")

    def watch_process(self, pidfd: int, name: str) -> None:
        """End when the process behind `pidfd` has ended."""
        self._add(pidfd, select.EPOLLIN, f"{name} has ended")

    def end(self, why: str) -> NoReturn:
        """Remove what would be left behind and kill every process of this group, this one included."""
        print(f"host ends: {why}", file=sys.stderr, flush=True)
        self.clean()
        os.killpg(0, signal.SIGKILL)
        raise AssertionError("nobody survives SIGKILL")

    def clean(self) -> None:
        """Remove the folder and the shared memory of this process group."""
        remove(self._folder, also=shared_names())

    def _add(self, fd: int, events: int, why: str) -> None:
        self._why[fd] = why
        self._poll.register(fd, events)

    def _watch(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if self._off:
                    return
                self.end(self._why[fd])


def shared_names() -> set[str]:
    """Return the names under /dev/shm that this process's group has mapped."""
    names: set[str] = set()
    group = os.getpgrp()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) != group:
                continue
            lines = (entry / "maps").read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        for line in lines:
            _, found, name = line.partition(f"{SHARED_MEMORY}/")
            if found and not name.endswith(" (deleted)"):
                names.add(name)
    return names


def record_shared_names(folder: Path) -> None:
    """Write down what would outlive this group, for whoever removes its folder if nobody of it can."""
    (folder / SHARED_NAMES_FILE).write_text("\n".join(sorted(shared_names())))


def remove(folder: Path, also: set[str] | None = None) -> None:
    """Remove a host's folder, and the shared memory whose names it holds."""
    names = set(also or ())
    try:
        names |= set((folder / SHARED_NAMES_FILE).read_text().split())
    except OSError:
        pass
    for name in names:
        if "/" not in name:
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
