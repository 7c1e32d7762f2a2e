"""Pools in a router: a full one delays no other, and another stands in for one that refuses or is gone."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.outliers import Ejection
from actors.routing.pools.grid import Axis, Grid
from actors.routing.pools.service_levels import LegPools, ServiceLevels
from actors.routing.route import FailoverLimits
from protocol.errors import InternalError, LinkLost
from protocol.messages.cluster import Leg
from protocol.messages.generation import RoutingHints
from tests.rig.routed_pools import THREE, aimed, asked, pair_levels, pair_workers, three, whole_levels
from tests.rig.router import Fake, Play, ask, check_whole, generate, prefill_info, routed

# The grid -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ttft_ms", "itl_ms", "workers"),
    [
        (4, 0, 0, {"pq", "d0"}),
        (4, None, None, {"p1", "d1"}),
        (4, 499, 49, {"pq", "d0"}),
        (4, 500, 50, {"p1", "d1"}),
        (50, 0, 0, {"p3", "d0"}),
        (100, None, 0, {"p3", "d2"}),
    ],
)
async def test_a_request_is_asked_in_the_pools_of_its_cells(
    prompt: int, ttft_ms: float | None, itl_ms: float | None, workers: set[str], autojump_clock: MockClock
) -> None:
    async with routed(*pair_workers(), levels=pair_levels()) as rig:
        hints = RoutingHints(ttft_target_ms=ttft_ms, itl_target_ms=itl_ms)
        wanted = evolve(generate(prompt=[1] * prompt), hints=hints)
        check_whole(await ask(rig, wanted), wanted)
        assert set(asked(rig)) == workers
        assert all(worker.asked[0].hints is None for worker in rig.pool.all if worker.asked)


async def test_a_request_that_continues_is_mapped_by_what_was_sent(autojump_clock: MockClock) -> None:
    workers = pair_workers()
    first = next(worker for worker in workers if worker.name == "d1")
    first.plays = [Play(LinkLost("gone"), 3)]
    async with routed(*workers, levels=pair_levels()) as rig:
        wanted = generate(prompt=[1] * 98)  # and 3 tokens of the answer are more than 100
        check_whole(await ask(rig, wanted), wanted)
        assert {name: len(ids) for name, ids in asked(rig).items()} == {"p3": 2, "d1": 1, "d2": 1}


# Full pools -----------------------------------------------------------------------------------------


async def test_a_full_pool_delays_no_request_of_another(autojump_clock: MockClock) -> None:
    async with (
        routed(Fake("quick", slots=1), Fake("cheap", slots=1), levels=whole_levels(quick=1, cheap=0)) as rig,
        trio.open_nursery() as nursery,
    ):
        for number in range(4):
            nursery.start_soon(ask, rig, aimed(f"q{number}", 0))
            await trio.sleep(0.01)
        for name, ttft_ms in (("c0", None), ("c1", 5e5)):
            nursery.start_soon(ask, rig, aimed(name, ttft_ms))
            await trio.sleep(0.01)
        assert asked(rig) == {"quick": ["q0"], "cheap": ["c0"]}, "the idle one is no faster one"
        assert rig.inbox.waiting_by_group() == {("quick",): 3, ("cheap",): 1}
        await trio.sleep(100)
        assert asked(rig) == {"quick": ["q0", "q1", "q2", "q3"], "cheap": ["c0", "c1"]}
        assert rig.worker("quick").times == pytest.approx([0, 6, 12, 18])
        assert rig.worker("cheap").times == pytest.approx([0.04, 6.04])


async def test_pools_of_decodes_have_equal_shares_of_a_prefill_however_many_decodes_each_has(
    autojump_clock: MockClock,
) -> None:
    names = {"quick": frozenset({"d0"}), "slow": frozenset(f"d{number}" for number in range(1, 8))}
    grid = Grid(Axis(0, 100, 1), Axis(0, 100, 2), (("quick", "slow"),))
    levels = ServiceLevels({Leg.DECODE: LegPools(grid, names, {"quick": 9, "slow": 0})})
    decodes = [Fake(f"d{number}", leg=Leg.DECODE, slots=16) for number in range(8)]
    async with routed(Fake("p", leg=Leg.PREFILL, slots=8, info=prefill_info()), *decodes, levels=levels) as rig:
        async with trio.open_nursery() as nursery:
            for number in range(6):
                wanted = evolve(generate(f"q{number}"), hints=RoutingHints(itl_target_ms=0))
                nursery.start_soon(ask, rig, wanted)
            await trio.sleep(0.1)
            assert len(asked(rig)["d0"]) == 4, "half of its slots"
            for number in range(6):
                nursery.start_soon(ask, rig, generate(f"s{number}"))
            await trio.sleep(0.1)
            assert sorted(asked(rig)) == ["d0", "d1", "d2", "d3", "d4", "p"]
        assert len(rig.worker("p").asked) == 12


@pytest.mark.parametrize("seed", range(20))
async def test_no_pool_is_ever_idle_while_a_request_waits_for_it(seed: int, autojump_clock: MockClock) -> None:
    names = {"a": 3, "b": 2, "c": 1}
    workers = [Fake(name, slots=1 + (seed + place) % 3) for place, name in enumerate(names)]
    async with routed(*workers, inbox_size=4, levels=whole_levels(**names)) as rig:

        async def watch() -> None:
            while True:
                await trio.sleep(0.25)
                await wait_all_tasks_blocked()
                for group, number in rig.inbox.waiting_by_group().items():
                    assert isinstance(group, tuple)
                    (pool,) = group
                    assert not number or rig.worker(pool).busy == rig.worker(pool).slots

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as clients:
                for number in range(30):
                    target = 1000 * ((number * (seed + 1)) % 3) + 10.0
                    clients.start_soon(ask, rig, aimed(str(number), target, tokens_max=1 + (number + seed) % 5))
                    await trio.sleep(0.3 * (number % 4))
            nursery.cancel_scope.cancel()
        for place, name in enumerate(names):
            wanted = [str(number) for number in range(30) if (number * (seed + 1)) % 3 == place]
            assert sorted(asked(rig).get(name, [])) == sorted(wanted)


# Pools that are gone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "ttft_ms", "worker"),
    [
        (["cheap"], 2500, "middle"),
        (["middle"], 1500, "quick"),
        (["quick"], 0, "cheap"),  # there is no faster one: any, and of equals the first by name
        (["quick", "cheap"], 0, "middle"),
        (["middle", "quick"], 1500, "cheap"),
    ],
)
async def test_another_pool_stands_in_for_one_that_is_gone(
    gone: list[str], ttft_ms: float, worker: str, autojump_clock: MockClock
) -> None:
    async with routed(*three(), levels=whole_levels(**THREE)) as rig:
        rig.pool.change(*gone)
        await ask(rig, aimed("a", ttft_ms))
        assert asked(rig) == {worker: ["a"]}
        assert rig.worker(worker).times == [0]
        rig.pool.back()
        await ask(rig, aimed("b", ttft_ms))
        mapped = [*THREE][int(ttft_ms // 1000)]
        assert asked(rig)[mapped][-1] == "b"


async def test_requests_that_wait_for_a_pool_leave_for_another_when_it_goes(autojump_clock: MockClock) -> None:
    async with (
        routed(Fake("quick"), Fake("cheap", slots=1), levels=whole_levels(quick=1, cheap=0)) as rig,
        trio.open_nursery() as nursery,
    ):
        for number in range(3):
            nursery.start_soon(ask, rig, aimed(str(number), None))
            await trio.sleep(0.01)
        await trio.sleep(2)
        assert rig.inbox.waiting == (2, 0)
        rig.pool.change("cheap")
        await trio.sleep(0.5)
        assert asked(rig) == {"cheap": ["0"], "quick": ["1", "2"]}


async def test_a_worker_without_a_pool_serves_only_when_all_pools_are_gone(autojump_clock: MockClock) -> None:
    async with routed(Fake("quick", slots=1), Fake("a-spare"), levels=whole_levels(quick=1)) as rig:
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(ask, rig, aimed(str(number), 0))
                await trio.sleep(0.01)
        assert asked(rig) == {"quick": ["0", "1"]}
        rig.pool.change("quick")
        await ask(rig, aimed("2", 0))
        assert asked(rig)["a-spare"] == ["2"]


async def test_a_pool_whose_workers_are_ejected_is_gone_until_one_may_be_probed(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(ejection=Ejection(failures_max=1, ejected_s=30))
    broken = [Play(InternalError("a bug"), 0)]
    async with routed(*three(middle=broken), levels=whole_levels(**THREE), limits=limits) as rig:
        with pytest.raises(InternalError):
            await ask(rig, aimed("0", 1500))
        await ask(rig, aimed("1", 1500))
        assert asked(rig) == {"middle": ["0"], "quick": ["1"]}
        await trio.sleep(30)
        await ask(rig, aimed("2", 1500))
        assert asked(rig)["middle"] == ["0", "2"]
