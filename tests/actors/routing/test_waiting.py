"""Requests that wait for another route stand in lines: of all, the first looks at a change, for those behind it too."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import trio
from attrs import define
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.candidates import Candidates, Choice
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.ports import RoutingObserver
from actors.routing.route import FailoverLimits, Route
from actors.routing.routing import Routing
from protocol.messages.generation import Generate
from tests.rig.router import Fake, FakePool, ask, generate, routed


@define
class CountingPolicy:
    """The least loaded worker, and how often it was asked for."""

    looks: int = 0

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        self.looks += 1
        return least_loaded(request, candidates)


def routing_of(pool: FakePool, policy: CountingPolicy) -> Routing:
    return Routing(pool, policy, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset(), RoutingObserver())


async def wait(routing: Routing, got: list[Route], *, crashed: Collection[str] = ()) -> None:
    got.append(await routing.wait_for_other(generate(), (), crashed, 0.0))


async def test_a_change_is_looked_at_by_one_of_those_that_wait(autojump_clock: MockClock) -> None:
    busy, policy, got = Fake("a", slots=2, more=2), CountingPolicy(), list[Route]()
    pool = FakePool([busy], None)
    routing = routing_of(pool, policy)
    async with trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(wait, routing, got)
        await wait_all_tasks_blocked()
        policy.looks = 0
        pool.change()
        await wait_all_tasks_blocked()
        looks_of_one = policy.looks
        assert 0 < looks_of_one <= 4
        busy.slots = 5
        pool.change()
        await wait_all_tasks_blocked()
        assert len(got) == 3, "one change may be room for several"
        assert policy.looks <= 6 * looks_of_one
        for route in got:
            route.end()
        nursery.cancel_scope.cancel()


async def test_one_that_leaves_passes_its_turn_on(autojump_clock: MockClock) -> None:
    busy, got = Fake("a", slots=1, more=1), list[Route]()
    pool = FakePool([busy], None)
    routing = routing_of(pool, CountingPolicy())
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(5):
            async with trio.open_nursery() as first:
                first.start_soon(wait, routing, got)
                await trio.sleep(1)
                nursery.start_soon(wait, routing, got)
        await wait_all_tasks_blocked()
        assert not got
        busy.more = 0
        pool.change()
        await wait_all_tasks_blocked()
        (route,) = got
        route.end()


async def test_requests_that_may_go_elsewhere_wait_for_no_others(autojump_clock: MockClock) -> None:
    full, idle, got = Fake("full", more=4), Fake("idle"), list[Route]()
    pool = FakePool([full, idle], None)
    routing = routing_of(pool, CountingPolicy())
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait, routing, list[Route]())
            nursery.start_soon(lambda: wait(routing, list[Route](), crashed=["idle"]))
        await wait_all_tasks_blocked()
        nursery.start_soon(wait, routing, got)
        await wait_all_tasks_blocked()
        assert [route.name for route in got] == ["idle"]
        nursery.cancel_scope.cancel()


async def test_requests_that_have_lost_their_workers_come_before_new_ones(autojump_clock: MockClock) -> None:
    worker, got = Fake("a", slots=20, more=20), list[Route]()
    async with routed(worker) as rig, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(wait, rig.routing, got)
        await wait_all_tasks_blocked()
        for number in range(20):
            nursery.start_soon(ask, rig, generate(f"{number}"))
        await wait_all_tasks_blocked()
        worker.more = 0
        rig.pool.change()
        await wait_all_tasks_blocked()
        assert (len(got), len(worker.asked)) == (20, 0)
        for route in got:
            route.end()


async def test_those_that_are_given_routes_in_one_turn_go_on_in_this_order(autojump_clock: MockClock) -> None:
    busy, went_on = Fake("a", slots=5, more=5), list[int]()
    pool = FakePool([busy], None)
    routing = routing_of(pool, CountingPolicy())

    async def go_on(number: int) -> None:
        route = await routing.wait_for_other(generate(), (), (), 0.0)
        went_on.append(number)
        route.end()

    for _ in range(12):  # Trio runs the tasks that are woken in one turn forwards or backwards
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(go_on, number)
                await wait_all_tasks_blocked()
            busy.more = 0
            pool.change()
        busy.more = 5
    assert went_on == [*range(5)] * 12


@pytest.mark.parametrize("_", range(20))  # who runs first in a turn is chance
async def test_one_that_leaves_as_it_is_given_a_route_gives_it_back(_: int, autojump_clock: MockClock) -> None:
    busy, got = Fake("a", slots=2, more=2), list[Route]()
    pool = FakePool([busy], None)
    routing = routing_of(pool, CountingPolicy())
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(wait, routing, got)
            await wait_all_tasks_blocked()
            if number == 0:
                leaver = trio.CancelScope()

                async def leave(scope: trio.CancelScope) -> None:
                    with scope:
                        await wait(routing, got)

                nursery.start_soon(leave, leaver)
                await wait_all_tasks_blocked()
        busy.more = 0
        pool.change()
        leaver.cancel()
        await wait_all_tasks_blocked()
        assert len(got) == 2
        for route in got:
            route.end()
        pool.change()
        await wait_all_tasks_blocked()
        assert len(got) == 3
        got[-1].end()
    assert routing.statistics().requests == 0
    assert (len(routing.waiting), routing.waiting.lines) == (0, 0)
