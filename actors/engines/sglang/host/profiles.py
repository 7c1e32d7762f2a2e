"""Profiles of an SGLang engine: torch's profiler in its schedulers, within limits of steps and of time.

A scheduler that is asked for a second profile loses the first, and one whose profile has ended by its steps tells
nobody. So the state is kept here: one profile at a time, and a task that ends it when its time is over. A scheduler
writes its file where a variable of its environment says, between two steps; until the file is whole it neither computes
nor answers. So `busy` lets its processor time count as a sign of life.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from attrs import define, field, frozen
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import ProfileReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.profile_check import NO_PROFILE, check_profile, is_running
from actors.engines.sglang.host.kept_files import KeptFiles
from protocol.errors import BadRequest, EngineRefused
from protocol.messages.kind import Message
from protocol.messages.profile import Activity, Profiled, ProfileEnd, Profiling, StartProfile, StopProfile

POLL_S = 0.25
STEP_BYTES = 32 * 1024 * 1024  # of a large model with lines of code, before it is packed
NOT_IN_PROGRESS = "not in progress"  # in SGLang's answer where no profile runs


@frozen
class _Running:
    """A profile that has been started: the beginning of the names of its files, and its limits."""

    name: str
    ends_at: float


@define(eq=False)
class Profiles:
    """The profiles of one engine."""

    manager: TokenizerManager
    files: KeptFiles
    schedulers: int  # on this node, each of which writes a file
    activities: Sequence[Activity]  # that they can record
    _running: _Running | None = None
    _ended: Profiled | None = None  # the last one, until it has been asked for
    _watching: asyncio.Task[None] | None = None
    _lock: asyncio.Lock = field(factory=asyncio.Lock)

    @property
    def busy(self) -> bool:
        """Whether a profile runs, or its files are being written."""
        return self._running is not None

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of its operations."""
        return {StartProfile: self._start, StopProfile: self._stop}

    async def _start(self, request: Message) -> Profiling:
        assert isinstance(request, StartProfile)
        activities = check_profile(request, self.activities)
        now = asyncio.get_running_loop().time()
        async with self._lock:
            if (running := self._running) is not None:
                if not self._all_written(running):
                    raise is_running(running.name, running.ends_at - now)
                await self._end(running, ProfileEnd.STEPS)
            name = f"profile-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() // 1_000_000 % 1000:03}"
            self.files.begin(name, request.steps * STEP_BYTES)
            await self._ask_to_start(name, request, activities)
            self._running, self._ended = _Running(name, now + request.seconds), None
            self._watching = asyncio.get_running_loop().create_task(self._watch(self._running))
        return Profiling(name, request.seconds)

    async def _ask_to_start(self, name: str, request: StartProfile, activities: Sequence[Activity]) -> None:
        """Have the schedulers begin; raises `EngineRefused` with their own reason."""
        try:
            await self.manager.start_profile(
                ProfileReq(
                    profile_id=name,
                    num_steps=request.steps,
                    activities=[activity.value.upper() for activity in activities],
                    with_stack=request.with_stack,
                    record_shapes=request.record_shapes,
                )
            )
        except RuntimeError as error:  # SGLang's own refusal
            self.files.finish(name)
            raise EngineRefused(f"the profiler did not start: {error}") from error

    async def _stop(self, _: Message) -> Profiled:
        async with self._lock:
            if (running := self._running) is not None:
                await self._end(running, ProfileEnd.STOPPED)
            ended, self._ended = self._ended, None
        if ended is None:
            raise BadRequest(NO_PROFILE)
        return ended

    async def _watch(self, running: _Running) -> None:
        """End a profile at its first limit."""
        while self._running is running:
            await asyncio.sleep(POLL_S)
            if (reason := self._due(running)) is not None:
                async with self._lock:
                    if self._running is running:
                        with suppress(EngineRefused):  # the scheduler's own reason is in the log
                            await self._end(running, reason)

    def _due(self, running: _Running) -> ProfileEnd | None:
        """Return which limit of a profile has been reached, None if it goes on."""
        if self._all_written(running):
            return ProfileEnd.STEPS
        if asyncio.get_running_loop().time() >= running.ends_at:
            return ProfileEnd.SECONDS
        return None

    def _all_written(self, running: _Running) -> bool:
        """Whether every scheduler has ended a profile by itself, or is about to write the last byte of its file."""
        return len(self.files.named(running.name)) >= self.schedulers

    async def _end(self, running: _Running, reason: ProfileEnd) -> None:
        """Stop the schedulers' profile, wait until its files are written, and keep its end for `StopProfile`."""
        try:
            # One that has ended by itself answers as soon as its file is whole.
            await self.manager.stop_profile()
        except RuntimeError as error:
            if NOT_IN_PROGRESS not in str(error):
                raise EngineRefused(f"the profile was lost: {error}") from error
            reason = ProfileEnd.STEPS
        finally:
            self._running = None
            self.files.finish(running.name)
        await asyncio.to_thread(self.files.trim)
        self._ended = Profiled(running.name, reason, tuple(self.files.named(running.name)))


def profiles_of(engine: Engine, files: KeptFiles) -> Profiles:
    """Return the profiles of an engine: one file a rank on this node, and on a CPU no kernels of a device."""
    args = engine.server_args
    schedulers = args.dp_size * max(1, args.tp_size * args.pp_size // args.nnodes)
    activities = (Activity.CPU,) if args.device == "cpu" else (Activity.CPU, Activity.GPU)
    return Profiles(engine.tokenizer_manager, files, schedulers, activities)
