"""Profiles of a simulated engine: a span for each of its next steps, as a file of trace events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import trio
from attrs import define, field, frozen

from actors.engines.profile_check import NO_PROFILE, check_profile, is_running
from actors.engines.simulated.kept_files import SimulatedFiles
from protocol.errors import BadRequest
from protocol.messages.kind import Message
from protocol.messages.profile import Activity, Profiled, ProfileEnd, Profiling, StartProfile, StopProfile

MICROSECONDS = 1_000_000


@frozen
class _Running:
    """A profile that has been started, and the ends of the steps since."""

    name: str
    began_at: float
    ends_at: float
    steps_max: int
    steps: list[float] = field(factory=list)


@define(eq=False)
class SimulatedProfiles:
    """The profiles of one engine."""

    files: SimulatedFiles
    _numbers: count[int] = field(factory=lambda: count(1))
    _running: _Running | None = None
    _ended: Profiled | None = None  # the last one, until it has been asked for

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of its operations."""
        return {StartProfile: self._start, StopProfile: self._stop}

    def on_step(self) -> None:
        """Record that a step has ended."""
        self._end_if_late()
        if (running := self._running) is not None:
            running.steps.append(trio.current_time())
            if len(running.steps) >= running.steps_max:
                self._end(running, ProfileEnd.STEPS)

    async def _start(self, request: Message) -> Profiling:
        assert isinstance(request, StartProfile)
        await trio.lowlevel.checkpoint()
        check_profile(request, (Activity.CPU,))
        self._end_if_late()
        now = trio.current_time()
        if self._running is not None:
            raise is_running(self._running.name, self._running.ends_at - now)
        name = f"profile-{next(self._numbers)}"
        self._running, self._ended = _Running(name, now, now + request.seconds, request.steps), None
        return Profiling(name, request.seconds)

    async def _stop(self, _: Message) -> Profiled:
        await trio.lowlevel.checkpoint()
        self._end_if_late()
        if self._running is not None:
            self._end(self._running, ProfileEnd.STOPPED)
        ended, self._ended = self._ended, None
        if ended is None:
            raise BadRequest(NO_PROFILE)
        return ended

    def _end_if_late(self) -> None:
        if self._running is not None and trio.current_time() >= self._running.ends_at:
            self._end(self._running, ProfileEnd.SECONDS)

    def _end(self, running: _Running, reason: ProfileEnd) -> None:
        edges = [running.began_at, *running.steps]
        spans = [
            {
                "name": "step",
                "ph": "X",
                "pid": 1,
                "tid": 1,
                "ts": began * MICROSECONDS,
                "dur": (end - began) * MICROSECONDS,
            }
            for began, end in zip(edges, running.steps, strict=False)
        ]
        self.files.write(f"{running.name}.trace.json", json.dumps({"traceEvents": spans}).encode())
        self._running, self._ended = None, Profiled(running.name, reason, tuple(self.files.named(f"{running.name}.")))
