"""Threads for work on text: owners take turns, heavy work leaves a thread free, and a cancelled caller frees its place."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.offload import give_turn
from protocol.errors import Overloaded
from supervisor.threads.text_threads import HEAVY_CHARACTERS_MIN, Statistics, TextLimits, TextThreads
from tests.rig.nodes import until

LIGHT = HEAVY_CHARACTERS_MIN - 1


async def hold(
    threads: TextThreads, owner: str, size: int, order: list[Any], name: str | None = None, *, task_s: float = 1.0
) -> None:
    """Hold a thread for a second of virtual time, and record the order of acquisition."""
    await threads.acquire(owner, heavy=size >= HEAVY_CHARACTERS_MIN)
    try:
        order.append(name or owner)
        await trio.sleep(task_s)
    finally:
        threads.release(owner, heavy=size >= HEAVY_CHARACTERS_MIN)


async def together(threads: TextThreads, *asked: tuple[str, int]) -> list[str]:
    """Let callers ask one after the other, and return the order in which they were served."""
    order: list[str] = []
    async with trio.open_nursery() as nursery:
        for owner, size in asked:
            nursery.start_soon(hold, threads, owner, size, order)
            await wait_all_tasks_blocked()
    assert (threads.running, threads.waiting) == (0, 0)
    assert threads.statistics().owners == 0
    return order


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_behind_many_long_prompts_of_one_key_another_waits_for_one_task(
    threads: int, autojump_clock: MockClock
) -> None:
    pool = TextThreads(TextLimits(threads=threads))
    order: list[str] = []
    async with trio.open_nursery() as nursery:
        for owner in ["greedy"] * 20 + ["alice"]:
            nursery.start_soon(hold, pool, owner, LIGHT, order)
            await wait_all_tasks_blocked()
        await trio.sleep(1.5)  # those that ran when it came are done, and the next run
        assert order.count("greedy") == 2 * threads - 1
        assert order.count("alice") == 1


async def test_owners_take_turns(autojump_clock: MockClock) -> None:
    order = await together(
        TextThreads(TextLimits(threads=1)), *[("a", LIGHT)] * 4, *[("b", LIGHT)] * 3, *[("c", LIGHT)] * 2
    )
    assert order == ["a", "b", "c", "a", "b", "c", "a", "b", "a"]


@pytest.mark.parametrize("others", [1, 2, 5])
async def test_owners_that_ask_again_at_once_do_not_starve_others(others: int, autojump_clock: MockClock) -> None:
    pool = TextThreads(TextLimits(threads=1))
    order: list[str] = []

    async def again(owner: str) -> None:
        while True:
            await hold(pool, owner, LIGHT, order)

    async with trio.open_nursery() as nursery:
        for _ in range(10):  # the first runs at once, so its queue has had a turn
            nursery.start_soon(hold, pool, "waits", LIGHT, order)
            await wait_all_tasks_blocked()
        for number in range(others):
            nursery.start_soon(again, f"asks again {number}")
        await trio.sleep(4 * (1 + others) + 0.5)
        assert order.count("waits") == 5  # one turn in each round
        nursery.cancel_scope.cancel()


async def test_heavy_work_leaves_a_thread_to_light_work(autojump_clock: MockClock) -> None:
    pool = TextThreads(TextLimits(threads=2))
    order: list[str] = []
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(partial(hold, pool, "", HEAVY_CHARACTERS_MIN, order, "heavy", task_s=10.0))
        await wait_all_tasks_blocked()
        assert (pool.running, pool.waiting) == (1, 4)
        began = trio.current_time()
        await hold(pool, "", LIGHT, order, "light")
        assert trio.current_time() - began == 1
        assert order == ["heavy", "light"]
    assert trio.current_time() == 50


async def test_queues_are_bounded_by_owner_and_in_total(autojump_clock: MockClock) -> None:
    pool = TextThreads(TextLimits(threads=1, waiting_max=5, key_waiting_max=3))
    async with trio.open_nursery() as nursery:
        for owner, size in [("a", LIGHT), ("a", LIGHT), ("a", HEAVY_CHARACTERS_MIN), ("a", LIGHT), ("b", LIGHT)]:
            nursery.start_soon(hold, pool, owner, size, [])
            await wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="3 long texts of this key"):
            await pool.acquire("a", heavy=False)
        nursery.start_soon(hold, pool, "c", LIGHT, [])
        await wait_all_tasks_blocked()
        with pytest.raises(Overloaded, match="5 long texts wait"):
            await pool.acquire("d", heavy=False)
    assert (pool.running, pool.waiting) == (0, 0)


async def test_a_cancelled_caller_gives_up_its_place_in_the_queue(autojump_clock: MockClock) -> None:
    pool = TextThreads(TextLimits(threads=1))
    order: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold, pool, "a", LIGHT, order)
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.5):
            await hold(pool, "b", LIGHT, order)
        nursery.start_soon(hold, pool, "c", LIGHT, order)
    assert order == ["a", "c"]
    assert pool.statistics() == Statistics(running=0, waiting=0, owners=0)


@pytest.mark.parametrize("first", ["leaves", "is given it"])
async def test_a_thread_given_to_a_caller_that_is_cancelled_in_the_same_turn_goes_to_the_next(
    first: str, autojump_clock: MockClock
) -> None:
    pool = TextThreads(TextLimits(threads=1))
    order: list[str] = []
    await pool.acquire("a", heavy=False)
    async with trio.open_nursery() as nursery, trio.open_nursery() as leaving:
        leaving.start_soon(hold, pool, "b", LIGHT, order)
        await wait_all_tasks_blocked()
        nursery.start_soon(hold, pool, "c", LIGHT, order)
        await wait_all_tasks_blocked()
        if first == "leaves":
            leaving.cancel_scope.cancel()
        pool.release("a", heavy=False)  # to b
        leaving.cancel_scope.cancel()
    assert order[-1] == "c"
    assert pool.statistics() == Statistics(running=0, waiting=0, owners=0)


async def test_a_result_or_an_error_is_passed_to_the_caller() -> None:
    pool = TextThreads(TextLimits(threads=1))
    assert await pool(threading.get_ident, owner="a", size=1) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await pool(lambda: 1 // 0, owner="a", size=1)
    assert pool.running == 0


@pytest.mark.realtime
async def test_an_abandoned_thread_counts_until_it_ends() -> None:
    pool, begun, go = TextThreads(TextLimits(threads=1)), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(pool, hang, owner="a", size=1))
        await until(begun.is_set)
        nursery.cancel_scope.cancel()
    assert pool.running == 1
    with trio.move_on_after(0.05) as waiting:
        await pool(int, owner="b", size=1)
    assert waiting.cancelled_caught
    assert pool.waiting == 0
    go.set()
    with trio.fail_after(60):
        assert await pool(int, owner="b", size=1) == 0
    assert pool.running == 0


async def test_a_request_fails_as_overloaded_if_the_system_has_no_thread_and_the_next_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, failing = TextThreads(TextLimits()), [True]
    start_new = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if failing:
            raise RuntimeError("can't start new thread")
        start_new(self)

    cache = trio._core._thread_cache  # noqa: SLF001  # Trio's own threads, which wait there for more
    monkeypatch.setattr(cache, "IDLE_TIMEOUT", 0.01)
    monkeypatch.setattr(cache.THREAD_CACHE, "_idle_workers", {})
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Overloaded, match="no thread left"):
        await threads(lambda: 1, owner="alice", size=1)
    assert (threads.running, threads.waiting) == (0, 0)
    failing.clear()
    assert await threads(lambda: 2, owner="alice", size=1) == 2


async def test_work_that_lasts_lets_others_have_its_thread() -> None:
    pool, order = TextThreads(TextLimits(threads=1)), list[str]()

    def long() -> None:
        order.append("begins")
        while "short" not in order:
            give_turn()
        order.append("ends")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(pool, long, owner="greedy", size=LIGHT))
        await until(lambda: order == ["begins"])
        with trio.fail_after(10):
            await pool(lambda: order.append("short"), owner="alice", size=LIGHT)
    assert order == ["begins", "short", "ends"]
    assert pool.statistics() == Statistics(0, 0, 0)


async def test_work_that_lasts_ends_soon_after_its_caller_has_left() -> None:
    pool = TextThreads(TextLimits(threads=1))

    def endless() -> None:
        while True:
            give_turn()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(pool, endless, owner="greedy", size=LIGHT))
        await until(lambda: pool.running == 1)
        nursery.cancel_scope.cancel()
    with trio.fail_after(10):
        await until(lambda: pool.running == 0)
    assert pool.statistics() == Statistics(0, 0, 0)


async def test_an_abandoned_thread_that_waits_for_its_turn_ends_with_it() -> None:
    pool, go_on = TextThreads(TextLimits(threads=1)), threading.Event()

    def endless() -> None:
        while True:
            give_turn()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(pool, endless, owner="greedy", size=LIGHT))
        await until(lambda: pool.running == 1)
        async with trio.open_nursery() as others:
            others.start_soon(partial(pool, go_on.wait, owner="alice", size=LIGHT))
            await until(lambda: pool.waiting == 1 and pool.statistics().owners == 2)
            nursery.cancel_scope.cancel()
            go_on.set()
    with trio.fail_after(10):
        await until(lambda: pool.running == 0)
    assert pool.statistics() == Statistics(0, 0, 0)
