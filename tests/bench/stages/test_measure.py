"""What is measured of a stage is what it does; how long it takes is never a test."""

from __future__ import annotations

from collections import deque

import trio

from bench.stages.measure import KEPT, AsyncOnce, Once, Stage, TaskStage, measure

SIZE = 10_000


def counting() -> tuple[Once, list[int]]:
    calls = [0]

    def once() -> None:
        calls[0] += 1

    return once, calls


def test_a_stage_is_prepared_anew_for_each_round_and_called_as_often_as_asked() -> None:
    prepared = []

    def prepare() -> Once:
        once, calls = counting()
        prepared.append(calls)
        return once

    (cost,) = measure([Stage("s", "token", prepare)], rounds=3, calls=50)
    assert len(cost.us) == 3
    assert len(prepared) == 4  # once more for the memory
    assert len({calls[0] for calls in prepared[:3]}) == 1
    assert prepared[0][0] >= 50


def test_a_round_measures_every_stage_before_the_next_begins() -> None:
    order = []

    def stage(name: str) -> Stage:
        def prepare() -> Once:
            order.append(name)
            return lambda: None

        return Stage(name, "token", prepare)

    measure([stage("a"), stage("b")], rounds=2, calls=1)
    assert order[:4] == ["a", "b", "a", "b"]


def test_memory_that_is_freed_is_a_peak_and_memory_that_stays_is_kept() -> None:
    rest: deque[bytes] = deque()
    stages = [
        Stage("freed", "token", lambda: lambda: len(bytes(SIZE))),
        Stage("result", "token", lambda: lambda: bytes(SIZE)),
        Stage("remembered", "token", lambda: lambda: rest.append(bytes(SIZE))),
    ]
    freed, result, remembered = (cost.memory for cost in measure(stages, rounds=1, calls=1))
    assert freed is not None
    assert result is not None
    assert remembered is not None
    assert min(freed.peak_bytes, result.peak_bytes, remembered.peak_bytes) >= SIZE
    assert freed.kept_bytes < SIZE / 10
    assert min(result.kept_bytes, remembered.kept_bytes) >= SIZE
    assert len(rest) > KEPT


def test_blocks_are_counted() -> None:
    (cost,) = measure([Stage("s", "token", lambda: lambda: [object() for _ in range(50)])], rounds=1, calls=1)
    assert cost.memory is not None
    assert 50 <= cost.memory.kept_blocks < 60


def test_a_stage_of_several_units_costs_each_its_part() -> None:
    stages = [Stage("s", "token", lambda: lambda: bytes(SIZE), units) for units in (1, 10)]
    one, ten = (cost.memory for cost in measure(stages, rounds=1, calls=1))
    assert one is not None
    assert ten is not None
    assert ten.kept_bytes < one.kept_bytes / 5
    assert ten.peak_bytes < one.peak_bytes / 5


def test_a_stage_that_awaits_may_have_helpers_which_end_with_it() -> None:
    ended = []

    async def prepare(nursery: trio.Nursery) -> AsyncOnce:
        nursery.start_soon(helper)
        await trio.lowlevel.checkpoint()
        return trio.lowlevel.checkpoint

    async def helper() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    (cost,) = measure([TaskStage("s", "request", prepare)], rounds=2, calls=5)
    assert len(cost.us) == 2
    assert len(ended) == 3
