"""Samples of sessions that nobody had, for tests of what is computed from them."""

from __future__ import annotations

from bench.turns.driving import Load, Sample, Turn
from tests.bench.cost.samples import spent


def turn(number: int, outside_s: float = 0.02) -> Turn:
    """Return a turn of one client."""
    groups = {"node front": spent(outside_s), "node worker-0": spent(0.004)}
    return Turn(number=number, prompt_tokens=[1000 * number], cached_tokens=[], first_token_ms=[30.0], groups=groups)


def sample(load: Load, *outside_s: float, round_number: int = 0) -> Sample:
    """Return a sample whose turns spent so much outside the engine."""
    turns = [turn(number, spent_s) for number, spent_s in enumerate(outside_s, start=1)]
    memory_mb = {"node front": 6.0, "launcher": 2.0, "node worker-0": 100.0}
    return Sample(load=load, round=round_number, turns=turns, idle_ms_a_s=5.0, memory_mb=memory_mb)
