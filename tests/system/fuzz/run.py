"""Plays many inputs at once against the real gateway, and checks what is left when all have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import Factory, frozen
from trio.testing import MockClock

from supervisor.gateway.keys.key_sources import KEYS, KeySources
from supervisor.gateway.keys.keys import Keys
from tests.rig.gateway import Rig, at_rest, gateway_rig
from tests.rig.scheduler import tasks
from tests.system.fuzz.player import Player, log_watched

CLIENTS = 64
SHARE = 5_000  # inputs that one gateway takes; of every eighth share the gateway wants keys
KEY = "Amber-Birch-Cedar-Date-Elder"
PROBLEMS_MAX = 50
LIMITS: dict[str, Any] = {"head_s": 2.0, "body_s": 3.0, "idle_s": 30.0, "websocket_idle_s": 30.0, "stall_s": 3.0}
LIMITS |= {"requests_max": 256, "waiting_max": 256, "first_token_s": 20.0, "total_s": 30.0}


@frozen
class Report:
    """The result of a run."""

    inputs: int
    took_s: float
    problems: list[str] = Factory(list)
    counts: Counter[str] = Factory(Counter)


def run(numbers: Sequence[int], seed: int = 0, *, show: bool = False) -> Report:
    """Play the inputs of these numbers; time jumps ahead whenever everybody waits."""
    begun = time.perf_counter()
    problems, counts = trio.run(partial(_run, numbers, seed, show=show), clock=MockClock(autojump_threshold=0.002))
    return Report(len(numbers), time.perf_counter() - begun, problems, counts)


async def _run(numbers: Sequence[int], seed: int, *, show: bool) -> tuple[list[str], Counter[str]]:
    problems: list[str] = []
    counts: Counter[str] = Counter()
    key = KEY if numbers[0] // SHARE % 8 == 7 else None
    active: set[int] = set()
    left = iter(numbers)

    async def client(rig: Rig) -> None:
        player = Player(rig.port, watch, problems, counts, active, show, key)
        try:
            for number in left:
                await player.play(number, seed)
                if len(problems) >= PROBLEMS_MAX:
                    break
        finally:
            player.forget()

    with log_watched() as watch:
        async with gateway_rig(**LIMITS) as rig:
            rig.gateway.keys = _keys(key)
            await trio.testing.wait_all_tasks_blocked()
            before = _held()
            async with trio.open_nursery() as nursery:
                for _ in range(min(CLIENTS, len(numbers))):
                    nursery.start_soon(client, rig)
            try:
                await at_rest(rig)
            except (trio.TooSlowError, AssertionError) as error:
                problems.append(f"no rest: {error!r}")
            await trio.testing.wait_all_tasks_blocked()
            if (after := _held()) != before:
                more = Counter(after[1]) - Counter(before[1])
                problems.append(f"something is left: {after[0] - before[0]} descriptors, {dict(more)}")
    problems += watch.bad
    counts["lines logged"] = watch.lines
    return problems, counts


def _keys(key: str | None) -> Keys:
    keys = Keys(KeySources(environment={} if key is None else {KEYS: f"fuzz={key}"}))
    keys.load()
    return keys


def _held() -> tuple[int, list[str]]:
    """Return how many descriptors this process has, and the names of all tasks."""
    return len([*Path("/proc/self/fd").iterdir()]), tasks()
