"""A network in virtual time: bytes arrive in arbitrary pieces, late, or not at all."""

from __future__ import annotations

import random
from collections import deque
from math import inf

import trio
from attrs import Factory, define, field


@define(eq=False)
class _Pipe:
    """One direction: bytes come in order, in arbitrary pieces, each at its own time, `room` of them at once."""

    rng: random.Random | None
    delay_s: float
    piece_max: int
    room: int
    cut: bool = False  # both ends are broken, and what was on its way is lost
    closed: bool = False  # the writing end said that nothing follows
    swallows: bool = False  # what is written is taken and never comes
    swallows_since: float = inf
    stalled_until: float = -inf  # nothing comes before
    held: int = 0
    _pieces: deque[tuple[float, bytes]] = Factory(deque)
    _last_at: float = -inf
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        start = 0
        while start < len(data):
            while self.held >= self.room and not self.cut:
                await self._changed.park()
            if self.cut or self.closed:
                raise trio.BrokenResourceError
            size = min(
                self.room - self.held, self.piece_max if self.rng is None else self.rng.randint(1, self.piece_max)
            )
            piece = data[start : start + size]
            start += len(piece)
            if self.swallows:
                continue
            self._pieces.append((self._due(), piece))
            self.held += len(piece)
            self._changed.unpark_all()

    async def read(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self.cut:
            if trio.current_time() < self.stalled_until:
                with trio.move_on_at(self.stalled_until):
                    await self._changed.park()
                continue
            due = self._take(trio.current_time())
            if due:
                self._changed.unpark_all()
                return due
            if self.closed and not self._pieces:
                return b""
            if self._pieces:
                with trio.move_on_at(self._pieces[0][0]):
                    await self._changed.park()
            else:
                await self._changed.park()
        return b""

    def change(self, *, cut: bool = False) -> None:
        self.closed = True
        if cut:
            self.cut = True
            self._pieces.clear()
        self._changed.unpark_all()

    def stall(self, until: float) -> None:
        self.stalled_until = max(until, self.stalled_until)
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
    """One end of a simulated connection; a `supervisor.links.transport.Transport`."""

    _into: _Pipe
    _out: _Pipe

    async def send_all(self, data: bytes) -> None:
        await self._out.write(bytes(data))

    async def receive_some(self) -> bytes:
        return await self._into.read()

    def close(self) -> None:
        """Close this end: what was sent still arrives, what comes is not read any more."""
        self._out.change()
        self._into.change()

    def cut(self) -> None:
        """Break both ends at once; what was on its way is lost, even in the middle of a frame."""
        self._out.change(cut=True)
        self._into.change(cut=True)

    def swallow(self) -> None:
        """Become half-open: accept what is written at either end, and deliver nothing more."""
        for pipe in (self._out, self._into):
            pipe.swallows, pipe.swallows_since = True, min(pipe.swallows_since, trio.current_time())

    def stall(self, until: float) -> None:
        """Deliver nothing at either end before some time: what is written meanwhile comes then."""
        self._out.stall(until)
        self._into.stall(until)

    def mute(self, until: float) -> None:
        """Deliver nothing of what this end says before some time, as if its process stood still."""
        self._out.stall(until)

    def acknowledged_s(self) -> float:
        """Return for how long the far kernel has not acknowledged what is sent: it does while its process stands still."""
        return max(0.0, trio.current_time() - self._out.swallows_since)

    @property
    def swallows(self) -> bool:
        """Whether it is half-open."""
        return self._out.swallows

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
