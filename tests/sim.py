"""A network that exists only in virtual time, a scheduler that obeys a seed, and instruments that count its steps."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf

import trio
import trio.testing
from attrs import Factory, define, field

DEADLOCKED_S = 1e6  # of virtual time, so at once when nothing else is left to happen


def simulate(scenario: Callable[[random.Random], Awaitable[object]], seed: int) -> object:
    """Run `scenario(rng)` so that the seed decides everything: time, order, faults. A deadlock is a failure."""
    from trio._core import _run  # the one private import; see python-trio/trio#3089

    async def bounded(rng: random.Random) -> object:
        with trio.fail_after(DEADLOCKED_S):
            return await scenario(rng)

    rng, before, allowed = random.Random(seed), _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r.seed(seed)
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True
    try:
        return trio.run(bounded, rng, clock=trio.testing.MockClock(autojump_threshold=0))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        _run._r.setstate(before)
        _run._ALLOW_DETERMINISTIC_SCHEDULING = allowed


@define(eq=False)
class _Pipe:
    """One direction: bytes come in order, in arbitrary pieces, each at its own time, `room` of them at once."""

    rng: random.Random | None
    delay_s: float
    piece_max: int
    room: int
    cut: bool = False  # both ends are broken, and what was on its way is lost
    closed: bool = False  # the writing end said that nothing follows
    held: int = 0
    _pieces: deque[tuple[float, bytes]] = Factory(deque)
    _last_at: float = -inf
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        at = 0
        while at < len(data):
            while self.held >= self.room and not self.cut:
                await self._changed.park()
            if self.cut or self.closed:
                raise trio.BrokenResourceError
            size = min(
                self.room - self.held, self.piece_max if self.rng is None else self.rng.randint(1, self.piece_max)
            )
            piece = data[at : at + size]
            self._pieces.append((self._due(), piece))
            self.held += len(piece)
            at += len(piece)
            self._changed.unpark_all()

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self.cut:
            due = self._take(trio.current_time())
            if due:
                self._changed.unpark_all()
                return due
            if self.closed and not self._pieces:
                return b""
            with trio.move_on_at(self._pieces[0][0] if self._pieces else inf):
                await self._changed.park()
        return b""

    def change(self, *, cut: bool = False) -> None:
        self.closed = True
        if cut:
            self.cut = True
            self._pieces.clear()
        self._changed.unpark_all()

    def _due(self) -> float:
        """When the next piece comes: with its predecessor, or a while after it was written."""
        delay_s = 0.0
        if self.rng is not None and self.delay_s and self.rng.random() < 0.5:
            delay_s = self.rng.expovariate(1 / self.delay_s)
        self._last_at = max(self._last_at, trio.current_time() + delay_s)
        return self._last_at

    def _take(self, now: float) -> bytes:
        taken = bytearray()
        while self._pieces and self._pieces[0][0] <= now:
            taken += self._pieces.popleft()[1]
            if self.rng is not None and self.rng.random() < 0.25:
                break
        self.held -= len(taken)
        return bytes(taken)


@define(eq=False)
class SimTransport:
    """One end of a simulated connection; a `supervisor.link.Transport`."""

    _into: _Pipe
    _out: _Pipe

    async def send_all(self, data: bytes) -> None:
        await self._out.write(bytes(data))

    async def receive_some(self) -> bytes:
        return await self._into.read()

    def close(self) -> None:
        """Say that nothing follows; what was sent still arrives. What comes is not read any more."""
        self._out.change()
        self._into.change()

    def cut(self) -> None:
        """Break both ends at once; what was on its way is lost, even in the middle of a frame."""
        self._out.change(cut=True)
        self._into.change(cut=True)

    @property
    def in_flight(self) -> int:
        """How many bytes are on their way in either direction."""
        return self._into.held + self._out.held


def sim_pair(
    rng: random.Random | None = None, *, delay_s: float = 0.0, piece_max: int = 65536, room: int = 65536
) -> tuple[SimTransport, SimTransport]:
    """Two ends of a connection. Without an `rng` everything arrives whole and at once; with one it decides."""
    there, back = (_Pipe(rng, delay_s, piece_max, room) for _ in range(2))
    return SimTransport(back, there), SimTransport(there, back)


class Steps(trio.abc.Instrument):
    """Counts the steps that tasks take, by the task's name, and acts just before the `at`-th of all."""

    def __init__(self, at: int = -1, act: Callable[[], None] | None = None) -> None:
        self.at, self.act = at, act
        self.taken = 0
        self.by_name: dict[str, int] = {}

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1
        name = task.name.rpartition(".")[2]
        self.by_name[name] = self.by_name.get(name, 0) + 1
        if self.taken == self.at and self.act is not None:
            self.act()


@contextmanager
def counting(at: int = -1, act: Callable[[], None] | None = None) -> Iterator[Steps]:
    """Count the steps taken while the body runs."""
    steps = Steps(at, act)
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)


def tasks(task: trio.lowlevel.Task | None = None) -> list[str]:
    """Name every task that lives below `task`, or below the root."""
    task = task or trio.lowlevel.current_root_task()
    assert task is not None
    return sorted(
        name
        for nursery in task.child_nurseries
        for child in nursery.child_tasks
        for name in (child.name, *tasks(child))
    )
