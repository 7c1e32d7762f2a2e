"""Budgets are shared fairly between owners, nothing of them is lost, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from actors.kit.fair_budget import BudgetStatistics, FairBudget
from actors.kit.shares import BudgetLimits
from protocol.errors import TooLarge


@asynccontextmanager
async def holder(budget: FairBudget, units: int, owner: str, begun: list[str], name: str = "") -> AsyncIterator[None]:
    async with budget.taking(units, owner):
        begun.append(name or owner)
        yield


async def hold(budget: FairBudget, units: int, owner: str, seconds: float, begun: list[str], name: str = "") -> None:
    async with holder(budget, units, owner, begun, name):
        await trio.sleep(seconds)


async def test_what_does_not_fit_waits_until_units_are_given_back(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("memory", BudgetLimits(10, 10)), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, budget, 7, "alice", 1.0, begun)
        await trio.sleep(0.1)
        nursery.start_soon(hold, budget, 4, "bob", 1.0, begun)
        await trio.sleep(0.1)
        assert begun == ["alice"]
        assert budget.statistics() == BudgetStatistics(taken=7, waiting=1)
        await trio.sleep(1.0)
        assert begun == ["alice", "bob"]
    assert budget.statistics() == BudgetStatistics(taken=0, waiting=0)


async def test_a_share_that_shrinks_lets_the_next_begin_at_once(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("memory", BudgetLimits(10, 10)), list[str]()
    async with trio.open_nursery() as nursery, budget.taking(10, "alice") as share:
        nursery.start_soon(hold, budget, 6, "bob", 0.0, begun)
        await trio.testing.wait_all_tasks_blocked()
        share.shrink(5)
        await trio.testing.wait_all_tasks_blocked()
        assert begun == []
        share.shrink(4)
        share.shrink(9)  # it is no growth
        await trio.testing.wait_all_tasks_blocked()
        assert begun == ["bob"]
        assert budget.taken == 4
    assert budget.taken == 0


async def test_the_owner_that_holds_least_is_next(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("a decoder", BudgetLimits(2, 2)), list[str]()
    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(hold, budget, 1, "greedy", 1.0, begun, f"greedy{number}")
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(hold, budget, 1, "alice", 1.0, begun, "alice")
        await trio.sleep(1.5)
        assert set(begun[2:4]) == {"alice", "greedy2"}


async def test_an_owner_has_no_more_than_its_part_not_even_by_one_call(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("memory", BudgetLimits(16, 6)), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, budget, 4, "alice", 1.0, begun, "first")
        nursery.start_soon(hold, budget, 3, "alice", 1.0, begun, "second")
        nursery.start_soon(hold, budget, 6, "bob", 1.0, begun, "bob")
        await trio.sleep(0.5)
        assert sorted(begun) in (["bob", "first"], ["bob", "second"])
        await trio.sleep(1.0)
        assert len(begun) == 3
        await trio.sleep(1.0)
        with pytest.raises(TooLarge, match="one request can have 6 of memory, and this one has 7"):
            await hold(budget, 7, "alice", 1.0, begun)


async def test_small_calls_pass_a_large_one_only_for_as_much_as_it_wants(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("memory", BudgetLimits(10, 10)), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, budget, 5, "first", 2.0, begun)
        await trio.sleep(0.1)
        nursery.start_soon(hold, budget, 8, "large", 1.0, begun)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(12):
            nursery.start_soon(hold, budget, 2, f"small{number}", 5.0 + number, begun)
            await trio.testing.wait_all_tasks_blocked()
        assert begun[:3] == ["first", "small0", "small1"]
        await trio.sleep(2.0)
        assert sorted(begun[3:]) == ["small2", "small3"]  # four times two is what the large one wants
        await trio.sleep(30.0)
        assert begun[5] == "large"
    assert len(begun) == 14


async def test_a_call_that_is_cancelled_gives_its_place_to_the_next(autojump_clock: MockClock) -> None:
    budget, begun = FairBudget("memory", BudgetLimits(4, 4)), list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, budget, 2, "alice", 9.0, begun)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.start_soon(hold, budget, 4, "large", 9.0, begun)
                await trio.testing.wait_all_tasks_blocked()
                for name in ("b", "c", "d"):
                    nursery.start_soon(hold, budget, 2, name, 0.5, begun)
                    await trio.testing.wait_all_tasks_blocked()
                await trio.sleep(1.2)
                assert begun == ["alice", "b", "c"]  # what is free is kept for the large one
                scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert begun == ["alice", "b", "c", "d"]
        assert budget.statistics().waiting == 0
        nursery.cancel_scope.cancel()
    assert budget.taken == 0


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_and_everybody_has_a_turn_whatever_happens(seed: int, autojump_clock: MockClock) -> None:
    random, budget, begun = Random(seed), FairBudget("memory", BudgetLimits(20, 15)), list[str]()
    most = 0

    async def ask(name: str, owner: str, units: int, patience_s: float) -> None:
        nonlocal most
        with trio.move_on_after(patience_s):
            async with budget.taking(units, owner) as share:
                begun.append(name)
                most = max(most, budget.taken)
                await trio.sleep(random.random())
                share.shrink(random.randint(0, units))
                await trio.sleep(random.random())

    async with trio.open_nursery() as nursery:
        for number in range(200):
            patience_s = random.choice([0.5, 3.0, 1000.0, 1000.0])
            name = f"{number}{'!' if patience_s == 1000.0 else ''}"
            nursery.start_soon(ask, name, random.choice("abcd"), random.randint(1, 15), patience_s)
            await trio.sleep(random.random() * 0.1)
    assert budget.statistics() == BudgetStatistics(taken=0, waiting=0)
    assert most <= 20
    assert len([name for name in begun if name.endswith("!")]) >= 60
