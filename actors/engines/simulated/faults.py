"""Faults that can be injected into a simulated engine."""

from __future__ import annotations

from typing import Annotated, Protocol

from attrs import frozen

from protocol.strict.checks import Within

Share = Annotated[float, Within(at_least=0, at_most=1)]


class Chance(Protocol):
    """A source of random numbers, such as a seeded `random.Random`."""

    def random(self) -> float:
        """Return the next number from 0 up to 1."""


@frozen(kw_only=True)
class Faults:
    """`[engine.NAME.simulated.faults]`: how an engine misbehaves; not at all by default."""

    slow: Annotated[float, Within(above=0)] = 1.0  # factor by which steps last longer than their cost
    stuck: Share = 0.0  # share of aborted requests that keep slot and memory while this is above 0
    refuse: Share = 0.0  # share of requests that are found wrong when their prompt is computed
    stall: Share = 0.0  # share of steps after which nothing happens for `stall_s`, releases included
    stall_s: Annotated[float, Within(at_least=0)] = 1.0  # duration of such a pause
    # time from the start to a crash, or from when this is set
    crash_after_s: Annotated[float, Within(above=0)] | None = None
