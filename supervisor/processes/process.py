"""A process that belongs to the tree: watched by its pidfd, ended by a ladder, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import trio
from attrs import define, field, frozen

from supervisor.processes import reaper


@frozen
class Ladder:
    """How long a process may take to end on each rung: after it was asked, after SIGTERM, after SIGKILL."""

    stop_s: float = 5.0
    term_s: float = 2.0
    kill_s: float = 2.0

    @property
    def total_s(self) -> float:
        """The longest that the whole ladder takes."""
        return self.stop_s + self.term_s + self.kill_s


@define(eq=False)
class GracePeriods:
    """Shortens every wait of a shutdown at once, when a second signal says so."""

    soon_s: float = 0.2
    shortened: bool = False
    _scopes: set[trio.CancelScope] = field(factory=set)

    @contextmanager
    def wait_at_most(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Shield the body for at most `seconds`, or `soon_s` once there is a hurry."""
        with trio.move_on_after(min(seconds, self.soon_s) if self.shortened else seconds, shield=True) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def now(self) -> None:
        """Be in a hurry from now on."""
        self.shortened = True
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, trio.current_time() + self.soon_s)


@define(eq=False)
class Process:
    """One process, the leader of its own group; `pidfd` is ours to close.

    Nobody else reaps it before it is closed, so that until then a signal to its group can reach no other.
    """

    name: str
    pid: int
    pidfd: int
    popen: subprocess.Popen[bytes] | None = None  # set if it is this process's own child
    release: Callable[[], None] = lambda: None  # to be called when its id may be given to others, if it is another's

    def __attrs_post_init__(self) -> None:
        reaper.watched_pids.add(self.pid)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await trio.lowlevel.wait_readable(self.pidfd)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, if it lives."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if any of it is left."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def end(self, ladder: Ladder, hurry: GracePeriods, ask: Callable[[], None] | None = None) -> None:
        """End the process and its whole group: ask, SIGTERM, SIGKILL, each with its deadline."""
        rungs: list[tuple[Callable[[], None], float]] = [
            (lambda: self.signal_group(signal.SIGTERM), ladder.term_s),
            (lambda: self.signal_group(signal.SIGKILL), ladder.kill_s),
        ]
        if ask is not None:
            rungs.insert(0, (ask, ladder.stop_s))
        for step, seconds in rungs:
            step()
            with hurry.wait_at_most(seconds) as scope:
                await self.wait()
            if not scope.cancelled_caught:
                break
        self.signal_group(signal.SIGKILL)  # whatever its leader left in the group
        self.close()

    def close(self) -> None:
        """Reap the process if it is ours, and forget it; idempotent."""
        if self.pidfd < 0:
            return
        if self.popen is not None:
            self.popen.poll()
        with suppress(ChildProcessError):  # a fork of the zygote that outlived it is ours to reap
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        os.close(self.pidfd)
        self.pidfd = -1
        reaper.watched_pids.discard(self.pid)
        self.release()


def start(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    fds: Sequence[int],
    log: int,
    first: Callable[[], None] | None = None,
) -> Process:
    """Start a process as the leader of its own session, with `fds` open in it and its output going to `log`.

    `first` is called in it before the command; it must take no lock, because another thread may have held that.
    Called from the main thread, so that a parent-death signal that it asks for is tied to this process's life and not
    to a worker thread's.
    """
    popen = subprocess.Popen(  # noqa: S603  # the command is ours
        command,
        pass_fds=tuple(fds),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=first,  # noqa: PLW1509  # one system call, and no lock is taken
    )
    try:
        return Process(name, popen.pid, os.pidfd_open(popen.pid), popen)
    except OSError:  # no descriptor is left to watch it by
        popen.kill()
        popen.wait()
        raise
