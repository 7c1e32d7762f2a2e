"""What is measured of a stage is what it does; how long it takes is never a test."""

from __future__ import annotations

import trio

from bench.stages.measure import Once, Stage, measure

SIZE = 10_000


def test_each_round_prepares_every_stage_anew_before_the_next_begins() -> None:
    prepared, calls = [], []

    def stage(name: str) -> Stage:
        def prepare(_: trio.Nursery) -> Once:
            prepared.append(name)
            return lambda: calls.append(name)

        return Stage(name, prepare)

    costs = measure([stage("a"), stage("b")], rounds=2, calls=50)
    assert [len(cost.us) for cost in costs] == [2, 2]
    assert prepared[:4] == ["a", "b", "a", "b"]
    assert len(prepared) == 6  # once more for the memory
    assert calls.count("a") == calls.count("b") >= 100


def test_the_peak_of_memory_is_divided_among_the_units_of_a_stage() -> None:
    stages = [Stage("s", lambda _: lambda: len(bytes(SIZE)), units) for units in (1, 10)]
    one, ten = (cost.peak_bytes for cost in measure(stages, rounds=1, calls=1))
    assert one >= SIZE
    assert ten < one / 5


def test_a_stage_that_awaits_may_have_tasks_which_end_with_it() -> None:
    ended = []

    def prepare(nursery: trio.Nursery) -> Once:
        nursery.start_soon(helper)
        return trio.lowlevel.checkpoint

    async def helper() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(True)

    (cost,) = measure([Stage("s", prepare)], rounds=2, calls=5)
    assert len(cost.us) == 2
    assert len(ended) == 3
