"""A profile of an engine: what its schedulers compute in a few steps, recorded into files.

The number of steps is always limited. A scheduler writes its file between two steps, and computes nothing meanwhile:
on a CPU about 0.07 s for each step of a model with two layers, and five times as long with the lines of code.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from protocol.messages.kind import Kind, Message
from protocol.messages.operation import EngineOperation, OperationScope

STEPS_MAX = 100
SECONDS_MAX = 600.0


class Activity(StrEnum):
    """A sort of work that a profile records."""

    CPU = "cpu"  # operators on the processor
    GPU = "gpu"  # kernels on the device


class ProfileEnd(StrEnum):
    """The reason for the end of a profile."""

    STOPPED = "stopped"  # by `StopProfile`
    STEPS = "steps"  # it has recorded all of them
    SECONDS = "seconds"  # its time was over


@frozen
class StartProfile(Message):
    """Record what the schedulers of an engine compute, until a limit or `StopProfile`; the result is `Profiling`."""

    activities: tuple[Activity, ...] = ()  # empty: all that the engine has
    steps: int = 5  # of the engine, at most `STEPS_MAX`
    seconds: float = 60.0  # after which an idle engine ends it, at most `SECONDS_MAX`
    with_stack: bool = False  # whether the lines of code are recorded, which slows every step down
    record_shapes: bool = False  # whether the shapes of tensors are recorded


@frozen
class Profiling(Message):
    """A profile has begun; its files have names that begin with `profile`."""

    profile: str
    seconds: float  # after which it ends by itself


@frozen
class StopProfile(Message):
    """End the profile that runs, or learn how the last one has ended by itself; the result is `Profiled`."""


@frozen
class Profiled(Message):
    """A profile has ended and left its files; a file that was larger than all may be is missing."""

    profile: str
    ended: ProfileEnd
    files: tuple[str, ...]


OPERATIONS = (
    EngineOperation(
        kind=Kind(99, StartProfile, result=Profiling),
        result_kind=Kind(100, Profiling),
        name="start-profile",
        participle="asked for a profile",
        summary="Record what an engine computes, for a limited time.",
        within_s=60.0,
        path="/start_profile",
        scope=OperationScope.ONE,
        example={"steps": 5},
    ),
    EngineOperation(
        kind=Kind(101, StopProfile, result=Profiled),
        result_kind=Kind(102, Profiled),
        name="stop-profile",
        participle="profiled",
        summary="End the profile of an engine, and name its files.",
        within_s=120.0,
        path="/stop_profile",
        scope=OperationScope.ONE,
    ),
)
