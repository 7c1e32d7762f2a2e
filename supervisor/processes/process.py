"""A child process of the tree: awaited through its pidfd, stopped by a ladder, never left behind.

- A pidfd instead of a process id: it becomes readable when the process ends, so Trio waits for it without a thread and
  without SIGCHLD, and a signal sent through it can never reach a later process of the same id.
- Each process leads a process group of its own, and is stopped with the whole group: an engine forks workers and does
  not clean them up itself. A group is signalled by its number, which the kernel may reuse once its leader is reaped;
  so the leader is reaped last, and only in `close` (see `reaper.watched_pids`).
- A stop is a ladder with a deadline on each rung: ask, SIGTERM, SIGKILL. A second Ctrl-C shortens all waits at once
  (`GracePeriods`), and skips no rung.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
from attrs import define, field, frozen

from supervisor.processes import reaper

STATE, EXIT_STATUS = 0, 49
"""The positions, in the line of `/proc/PID/stat` behind the name, of the state and of the status for `wait`."""


@frozen
class Ladder:
    """The grace periods of a stop in seconds: after the request, after SIGTERM, after SIGKILL."""

    stop_s: float = 5.0
    term_s: float = 2.0
    kill_s: float = 2.0

    @property
    def total_s(self) -> float:
        """The longest time of the whole ladder in seconds."""
        return self.stop_s + self.term_s + self.kill_s


@define(eq=False)
class GracePeriods:
    """The waits of a shutdown, which a second signal shortens all at once."""

    shortened_s: float = 0.2
    shortened: bool = False
    _scopes: set[trio.CancelScope] = field(factory=set)

    @contextmanager
    def wait_at_most(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Shield the body from cancellation for at most `seconds`, or `shortened_s` once they are shortened."""
        with trio.move_on_after(min(seconds, self.shortened_s) if self.shortened else seconds, shield=True) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def shorten(self) -> None:
        """Limit all present and future waits to `shortened_s` from now on."""
        self.shortened = True
        for scope in self._scopes:
            scope.deadline = min(scope.deadline, trio.current_time() + self.shortened_s)


@define(eq=False)
class Process:
    """One process, the leader of its own group; `pidfd` is closed by `close`.

    It is reaped only then, so until then a signal to its group can reach no other process.
    """

    name: str
    pid: int
    pidfd: int
    popen: subprocess.Popen[bytes] | None = None  # None: the process is a child of the zygote
    release: Callable[[], None] = lambda: None  # called once the process id may be reused: the zygote may reap it
    end: str | None = field(default=None, init=False)  # what ended it, if it was not this process: known once closed
    _sent: set[int] = field(factory=set, init=False)  # the signals of a stop

    def __attrs_post_init__(self) -> None:
        reaper.watched_pids.add(self.pid)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await trio.lowlevel.wait_readable(self.pidfd)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; do nothing if it has ended."""
        self._sent.add(number)
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the whole group; do nothing if it is empty."""
        if not self._has_ended():
            self._sent.add(number)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def stop(self, ladder: Ladder, grace: GracePeriods, ask: Callable[[], None] | None = None) -> None:
        """Stop the process and its whole group: ask, SIGTERM, SIGKILL, each with its grace period."""
        rungs: list[tuple[Callable[[], None], float]] = [
            (lambda: self.signal_group(signal.SIGTERM), ladder.term_s),
            (lambda: self.signal_group(signal.SIGKILL), ladder.kill_s),
        ]
        if ask is not None:
            rungs.insert(0, (ask, ladder.stop_s))
        for act, seconds in rungs:
            act()
            with grace.wait_at_most(seconds) as scope:
                await self.wait()
            if not scope.cancelled_caught:
                break
        self.signal_group(signal.SIGKILL)  # the members of the group without their leader
        self.close()

    def close(self) -> None:
        """Reap the process if it is a child of this one, and close its pidfd; idempotent."""
        if self.pidfd < 0:
            return
        self.end = self._read_end()
        if self.popen is not None:
            self.popen.poll()
        with suppress(ChildProcessError):  # a fork of a zygote that has died is a child of this process by now
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        os.close(self.pidfd)
        self.pidfd = -1
        reaper.watched_pids.discard(self.pid)
        self.release()

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _read_end(self) -> str | None:
        """Return how the process has ended, None if a signal of this process did it, or the kernel does not show it.

        The status of another process's child can be read as long as it is not reaped.
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            state, status = fields[STATE], int(fields[EXIT_STATUS])
        except (OSError, IndexError, ValueError):
            return None
        if state != "Z":
            return None
        if os.WIFEXITED(status):
            return f"it exited with code {os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        if number in self._sent:
            return None
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        memory = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
        return f"it was killed by {name}{memory}"


def start(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    fds: Sequence[int],
    log: int,
    preexec: Callable[[], None] | None = None,
) -> Process:
    """Start a process as the leader of its own session, with `fds` open and its output on the descriptor `log`.

    `preexec` is called in it before the command; it must take no lock, because another thread may have held it at the
    fork. To be called from the main thread: a parent-death signal is tied to the forking thread.
    """
    popen = subprocess.Popen(  # noqa: S603  # the command is ours
        command,
        pass_fds=tuple(fds),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=preexec,  # noqa: PLW1509  # a few system calls, and no lock is taken
    )
    try:
        return Process(name, popen.pid, os.pidfd_open(popen.pid), popen)
    except OSError:  # no descriptor is left for its pidfd
        popen.kill()
        popen.wait()
        raise
