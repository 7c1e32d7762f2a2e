"""The liveness of schedulers and vision towers, by questions: a sign in shared memory would outlive its scheduler.

The loop of a scheduler, or the thread of a vision tower, answers between two steps. While requests run, a step may take
longer than a probe should: an engine whose threads compute meanwhile counts as alive, and a request's duration is left
to the request's own deadlines. Such a thread may also wait for a disk, or for a compiler, which builds a kernel in a
process of its own when the kernel is first used. So these count as well, for a limited time. The other threads of a
scheduler do not: some poll a device for ever, whether or not the scheduler lives. An engine that neither answers nor
works is stopped, or waits for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import define, field, frozen

from protocol.messages.engine import Alive

POLL_S = 0.5
WORKING_TICKS = 0.05 * POLL_S * os.sysconf("SC_CLK_TCK")  # a share of a core: idle processes poll now and then
BUILD_S = 900.0  # longest wait for a compiler, which may build kernels for minutes
DISK_S = 120.0  # longest wait for a disk: a driver that hangs has the same state
DISK_WAIT = "D"  # the kernel's state of a thread that waits for a disk, or for a file of another machine


class LivenessProbe:
    """Probes an engine, one question at a time; `threads` are its computing threads, one a rank, by their `stat`.

    `processes` are the engine's own, which start compilers.
    """

    def __init__(
        self,
        ask: Callable[[], Coroutine[None, None, None]],
        threads: Sequence[Path],
        *,
        processes: Collection[int],
        independent: bool = False,
    ) -> None:
        self._ask = ask
        self._threads = threads
        self._processes = processes
        self._suffices = any if independent else all
        self._outputs = 0  # the number of outputs so far
        self._alive_at: float | None = None  # the last sign of the threads themselves
        self._question: asyncio.Task[None] | None = None

    def on_output(self) -> None:
        """Note that something has been computed."""
        self._outputs += 1

    async def probe(self, running: Callable[[], bool]) -> Alive:
        """Wait until anything comes from now on, or all threads have computed while requests are `running`.

        Of `independent` threads, some perhaps without a request, one that has computed is enough. While threads wait
        for a disk or for a process that they have started, the engine is held up: this counts, for a limited time.
        """
        loop = asyncio.get_running_loop()
        if self._alive_at is None:
            self._alive_at = loop.time()
        outputs, computed, started = self._outputs, self._computed(), _Started(self._processes)
        if self._question is None or self._question.done():
            self._question = loop.create_task(self._ask())
        while self._outputs == outputs and not self._question.done():
            await asyncio.wait({self._question}, timeout=POLL_S)
            if not running() or self._question.done():
                continue
            if self._suffices(map(int.__lt__, computed, self._computed())):
                break
            since_s, builds = loop.time() - self._alive_at, started.have_worked()
            reads = any(_stat(thread).state == DISK_WAIT for thread in self._threads)
            if (builds and since_s < BUILD_S) or (reads and since_s < DISK_S):
                return Alive(held_up=True)
        self._alive_at = loop.time()
        return Alive()

    def _computed(self) -> list[int]:
        """Return the processor time of each thread, in ticks of the kernel's clock."""
        return [_stat(thread).ticks for thread in self._threads]


def thread_of(process: int, thread: int) -> Path:
    """Return where the kernel counts the processor time of a thread, by its id in its process."""
    return Path(f"/proc/{process}/task/{thread}/stat")


@define
class _Started:
    """The processes that an engine has started, such as compilers, and their work between two looks."""

    engine: Collection[int]  # its own processes
    _before: dict[int, int] | None = field(init=False, default=None)  # the ticks of each process

    def have_worked(self) -> bool:
        """Whether they have computed for a good part of the time since the last look, which was `POLL_S` ago.

        Always false at the first look: most questions are answered before it, and it takes milliseconds.
        """
        before = self._before
        self._before = {pid: stat.ticks + stat.ended_ticks for pid, stat in _descendants(self.engine)}
        if before is None:
            return False
        return sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in self._before.items()) >= WORKING_TICKS


@frozen
class _Stat:
    """A process or a thread as the kernel reports it."""

    state: str
    parent: int
    ticks: int  # its processor time
    ended_ticks: int  # that of the ended children of its process


def _stat(file: Path) -> _Stat:
    """Return what a `stat` of the kernel has; nothing of a process that has ended, which the watchdog notices too."""
    with suppress(OSError):
        fields = file.read_text().rpartition(")")[2].split()
        user, system, ended_user, ended_system = map(int, fields[11:15])
        return _Stat(fields[0], int(fields[1]), user + system, ended_user + ended_system)
    return _Stat("", 0, 0, 0)


def _descendants(roots: Collection[int]) -> Iterator[tuple[int, _Stat]]:
    """Yield the processes that descend from others, without these."""
    stats = {int(place.name): _stat(place / "stat") for place in Path("/proc").iterdir() if place.name.isdecimal()}
    parents = {*roots}
    while found := [pid for pid, stat in stats.items() if stat.parent in parents]:
        parents = {*found}
        yield from ((pid, stats[pid]) for pid in found if pid not in roots)
