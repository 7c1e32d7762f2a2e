"""Pools in a router: another stands in for one that refuses, each request moves within its own, and all can be left."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.route import FailoverLimits
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineLost,
    EngineRefused,
    LinkLost,
    Overloaded,
    RequestError,
)
from tests.rig.routed_pools import THREE, aimed, asked, pair_levels, pair_workers, three, whole_levels, workers_of
from tests.rig.router import LOSSES, Fake, Play, ask, check_whole, generate, routed

NEVER = Play(None, 0)  # nothing comes, for ever


# Pools that refuse ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", LOSSES)
async def test_a_refusal_before_the_first_token_is_followed_by_the_next_faster_pool(
    error: type[RequestError], autojump_clock: MockClock
) -> None:
    plays = {name: [Play(error("no"), 0)] for name in ("cheap", "middle")}
    limits = FailoverLimits(crashes_max=2)
    async with routed(*three(**plays), levels=whole_levels(**THREE), limits=limits) as rig:
        wanted = aimed("a", 2500)
        check_whole(await ask(rig, wanted), wanted)
        assert workers_of(rig) == ["cheap", "middle", "quick"]
        assert rig.worker("quick").times == [1.0], "at once"


async def test_a_refusal_is_followed_by_another_worker_of_the_pool_first(autojump_clock: MockClock) -> None:
    workers = pair_workers()
    next(worker for worker in workers if worker.name == "p1").plays = [Play(Overloaded("no"), 0)]
    async with routed(*workers, levels=pair_levels()) as rig:
        await ask(rig, generate())
        assert {name: len(ids) for name, ids in asked(rig).items()} == {"p1": 1, "p2": 1, "d1": 2}


@pytest.mark.parametrize(("sent", "worker", "at_s"), [(0, "quick", 0.5), (1, "cheap1", 5.5), (3, "cheap1", 5.5)])
async def test_after_the_first_token_no_faster_pool_is_asked_while_one_of_its_own_is_full(
    sent: int, worker: str, at_s: float, autojump_clock: MockClock
) -> None:
    workers = [Fake("quick"), Fake("cheap0", [Play(EngineLost("gone"), sent)]), Fake("cheap1")]
    levels = whole_levels({"cheap": 2}, quick=1, cheap=0)
    async with routed(*workers, levels=levels) as rig, trio.open_nursery() as nursery:
        rig.worker("cheap1").more = 4

        async def free() -> None:
            await trio.sleep(5.5)
            rig.worker("cheap1").more = 0
            rig.pool.change()

        nursery.start_soon(free)
        wanted = aimed("a", None)
        check_whole(await ask(rig, wanted), wanted)
        assert workers_of(rig) == ["cheap0", worker]
        assert rig.worker(worker).times == [at_s]


async def test_after_the_first_token_the_next_faster_pool_continues_if_no_worker_is_left(
    autojump_clock: MockClock,
) -> None:
    async with routed(*three(cheap=[Play(LinkLost("gone"), 2)]), levels=whole_levels(**THREE)) as rig:
        wanted = aimed("a", 2500)
        check_whole(await ask(rig, wanted), wanted)
        assert workers_of(rig) == ["cheap", "middle"]


@pytest.mark.parametrize("error", [BadRequest("no"), DeadlineExceeded("late"), EngineRefused("too long")])
async def test_no_other_pool_is_asked_after_an_error_of_the_request(
    error: RequestError, autojump_clock: MockClock
) -> None:
    async with routed(*three(cheap=[Play(error, 0)]), levels=whole_levels(**THREE)) as rig:
        with pytest.raises(type(error)):
            await ask(rig, aimed("a", 2500))
        assert workers_of(rig) == ["cheap"]


# Moves ----------------------------------------------------------------------------------------------


async def test_a_request_that_waits_at_its_worker_moves_within_its_pool_only(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(move_after_s=2, moves_max=2)
    async with routed(*three(), levels=whole_levels(**THREE), limits=limits) as rig, trio.open_nursery() as nursery:
        rig.worker("cheap").plays = [NEVER]
        nursery.start_soon(ask, rig, aimed("a", 2500))
        await trio.sleep(1)
        rig.worker("cheap").more = 4  # others came at the same time
        await trio.sleep(20)
        assert asked(rig) == {"cheap": ["a"]}
        nursery.cancel_scope.cancel()


async def test_a_full_pool_holds_up_no_moves_within_another(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(move_after_s=2, moves_max=2)
    workers = [Fake("quick", [NEVER] * 2), Fake("cheap0", [NEVER]), Fake("cheap1")]
    levels = whole_levels({"cheap": 2}, quick=1, cheap=0)
    async with routed(*workers, levels=levels, limits=limits) as rig, trio.open_nursery() as nursery:
        for name, ttft_ms in (("q", 0), ("r", 0), ("c", None)):
            nursery.start_soon(ask, rig, aimed(name, ttft_ms))
            await trio.sleep(0.1)
        for name in ("quick", "cheap0"):
            rig.worker(name).more = 4
        await trio.sleep(5)
        assert asked(rig)["quick"] == ["q", "r"], "there is no other in their pool"
        assert len(asked(rig)["cheap1"]) == 1, "the one behind them in that round moves all the same"
        nursery.cancel_scope.cancel()


# Leaving --------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[float, dict[str, Any]]] = {
    "in the inbox": (0.5, {"cheap": [], "busy": True}),
    "at the first worker": (0.25, {"cheap": [Play(Overloaded("no"), 0)]}),
    "between two pools": (0.5, {"cheap": [Play(Overloaded("no"), 0)]}),
    "at the next pool": (0.75, {"cheap": [Play(Overloaded("no"), 0)]}),
    "while none has room": (2.0, {"cheap": [Play(Overloaded("no"), 0)], "busy": True}),
    "in the answer": (3.0, {"cheap": [Play(Overloaded("no"), 0)]}),
    "after a resume": (5.2, {"cheap": [Play(LinkLost("gone"), 3)]}),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_an_asker_may_leave_at_every_stage(stage: str, autojump_clock: MockClock) -> None:
    at_s, script = STAGES[stage]
    workers = three(cheap=script["cheap"])
    if script.get("busy"):
        for worker in workers:
            worker.more = 0 if worker.name == "cheap" and script["cheap"] else worker.slots
    async with routed(*workers, levels=whole_levels(**THREE)) as rig:
        with trio.move_on_after(at_s):
            await ask(rig, aimed("a", 2500))
        await wait_all_tasks_blocked()
        assert trio.current_time() == at_s
        for worker in rig.pool.all:
            worker.more = 0
        rig.pool.change()
        await ask(rig, aimed("b", 2500))
        assert asked(rig)["cheap"][-1] == "b"
