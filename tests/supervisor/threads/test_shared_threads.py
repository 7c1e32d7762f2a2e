"""Threads that never end cost their own owner a thread, and no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
import trio.testing

from actors.kit.fair_budget import BudgetStatistics, FairBudget
from actors.kit.shares import BudgetLimits
from protocol.errors import Overloaded
from supervisor.threads.shared_threads import SharedThreads
from supervisor.threads.text_threads import NO_THREAD


@contextmanager
def hanging() -> Iterator[threading.Event]:
    """Yield an event for threads to wait for, which is set at last."""
    hangs = threading.Event()
    try:
        yield hangs
    finally:
        hangs.set()


async def ended(threads: SharedThreads) -> None:
    with trio.fail_after(60):
        while threads.budget.taken:  # noqa: ASYNC110  # a thread reports its end to no task
            await trio.sleep(0.01)


def four_threads() -> SharedThreads:
    return SharedThreads(FairBudget("a thread", BudgetLimits.of_places(4)))


async def test_threads_that_never_end_are_those_of_their_owner() -> None:
    threads = four_threads()
    with hanging() as hangs:
        for _ in range(3):
            with pytest.raises(trio.TooSlowError):
                await threads.run(hangs.wait, owner="greedy", wait_s=60, within_s=0.01)
        with pytest.raises(Overloaded, match=r"none was free within 0\.01 s"):
            await threads.run(hangs.wait, owner="greedy", wait_s=0.01, within_s=60)
        assert await threads.run(lambda: "done", owner="alice", wait_s=60, within_s=60) == "done"
        assert threads.budget.taken == 3
    await ended(threads)


async def test_a_wait_for_a_thread_is_not_counted_as_work() -> None:
    threads = SharedThreads(FairBudget("a thread", BudgetLimits.of_places(1)))
    order = list[str]()
    with hanging() as hangs:
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                await threads.run(hangs.wait, owner="alice", wait_s=60, within_s=60)
                order.append("first")

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()

            async def work() -> None:
                await threads.run(lambda: order.append("second"), owner="bob", wait_s=60, within_s=0.5)

            nursery.start_soon(work)
            await trio.sleep(0.6)
            hangs.set()
    assert order == ["first", "second"]


async def test_work_that_raises_and_callers_that_leave_give_their_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = four_threads()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, owner="alice", wait_s=60, within_s=60)
    with hanging() as hangs, trio.move_on_after(0.01):
        await threads.run(hangs.wait, owner="alice", wait_s=60, within_s=60)
    await ended(threads)

    def cannot_start(*_: object) -> None:
        raise RuntimeError(NO_THREAD)

    cache = trio._core._thread_cache  # noqa: SLF001  # Trio's own threads, which wait there for more
    monkeypatch.setattr(cache, "IDLE_TIMEOUT", 0.01)
    monkeypatch.setattr(cache.THREAD_CACHE, "_idle_workers", {})
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    with pytest.raises(Overloaded, match="no thread left"):
        await threads.run(lambda: 1, owner="alice", wait_s=60, within_s=60)
    assert threads.budget.statistics() == BudgetStatistics(0, 0)
