"""A request that waits at an overcommitted worker moves to one where it can begin, and is never at both."""

from __future__ import annotations

import pytest
import trio
from attrs import define
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.candidates import Candidates, Choice, Policy
from actors.routing.load import Load
from actors.routing.outliers import Ejection
from actors.routing.route import FailoverLimits, Route
from actors.routing.routing import Routing
from protocol.errors import HandOffFailed, InternalError, Preempted
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from tests.rig.router import Fake, Play, Received, RouterRig, ask, check_whole, generate, prefill_info, routed
from tests.rig.tasks import append_result

SILENT = Play(None, 0)


@define(eq=False)
class Memory(Fake):
    """A worker that tells of its KV memory."""

    kv: int = 0
    kv_max: int = 100

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy + self.more, self.slots, 0, self.kv, self.kv_max)


def prefer_last(_: Generate, candidates: Candidates) -> Choice | None:
    """A policy that asks for no memory."""
    load = max(candidates, key=lambda load: load.name, default=None)
    return None if load is None else Choice(load)


async def check_leaves(rig: RouterRig, nursery: trio.Nursery, worker: Memory) -> None:
    """Check that a request which waits at a worker is answered elsewhere once that has no memory for it."""
    got: list[Received] = []
    nursery.start_soon(append_result, got, ask, rig, generate())
    await wait_all_tasks_blocked()
    worker.kv = 120
    await trio.sleep(20)
    check_whole(got[0], generate())


async def test_a_request_that_waits_at_a_full_worker_moves_to_one_with_room(autojump_clock: MockClock) -> None:
    async with routed(Memory("a", [SILENT], kv=50), Memory("b", kv=99)) as rig, trio.open_nursery() as nursery:
        got: list[Received] = []
        nursery.start_soon(append_result, got, ask, rig, generate())
        await wait_all_tasks_blocked()
        rig.worker("a").kv = 120
        await trio.sleep(20)
        assert not rig.worker("b").asked, "nowhere is room"
        rig.worker("b").kv = 20
        await trio.sleep(20)
        (wanted,) = rig.worker("b").asked
        assert (wanted.id, wanted.resumed_tokens) == ("new 1", 0)
        check_whole(got[0], generate())
        assert rig.worker("a").left == [rig.worker("b").times[0]], "never at both at once"


async def test_a_request_stays_if_it_has_begun_or_its_worker_has_room(autojump_clock: MockClock) -> None:
    slow = Play(None, 3)
    async with routed(Memory("a", [slow, SILENT], kv=10), Memory("b", slots=0)) as rig, trio.open_nursery() as nursery:
        for name in ("begun", "waits"):
            nursery.start_soon(ask, rig, generate(name))
        await trio.sleep(3)
        rig.worker("b").slots = 8
        await trio.sleep(60)
        assert not rig.worker("b").asked, "worker a has room: it will begin"
        rig.worker("a").kv = 120
        await trio.sleep(10)
        assert [each.id for each in rig.worker("b").asked] == ["new 1"]
        assert rig.worker("a").left == [rig.worker("b").times[0]]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("policy", [None, prefer_last])
async def test_a_request_that_finds_no_memory_holds_up_no_smaller_one(
    policy: Policy | None, autojump_clock: MockClock
) -> None:
    a, b, c = Memory("a", [SILENT] * 9), Memory("b", slots=0, kv=50), Memory("c", slots=0, kv=97)
    async with routed(a, b, c) as rig, trio.open_nursery() as nursery:
        for name, tokens in (("big", 90), ("also big", 80), ("small", 4)):
            nursery.start_soon(ask, rig, generate(name, tokens))
            await wait_all_tasks_blocked()
        if policy is not None:
            rig.routing.policy = policy
        a.kv, b.slots, c.slots = 120, 16, 16
        await trio.sleep(20)
        assert [len(each.asked) for each in (a, b, c)] == [3, 1, 0]
        assert b.asked[0].sampling.tokens_max == 4
        nursery.cancel_scope.cancel()


async def test_a_request_leaves_an_overcommitted_decode_and_keeps_the_only_prefill(autojump_clock: MockClock) -> None:
    p = Memory("p", leg=Leg.PREFILL, info=prefill_info(b"p"), kv=10)
    d, e = (Memory(name, [SILENT], leg=Leg.DECODE, kv=50) for name in "de")
    e.more, e.plays = 1, []
    async with routed(p, d, e) as rig, trio.open_nursery() as nursery:
        await check_leaves(rig, nursery, d)
        assert [len(each.asked) for each in (p, d, e)] == [2, 1, 1]


async def test_a_request_moves_up_to_its_limit_and_each_time_later(autojump_clock: MockClock) -> None:
    workers = [Memory(name, [SILENT] * 9, kv=kv) for name, kv in (("a", 10), ("b", 20), ("c", 30), ("d", 40))]
    limits = FailoverLimits(move_after_s=2, moves_max=2)
    async with routed(*workers, limits=limits) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(ask, rig, generate())
        await wait_all_tasks_blocked()
        for worker in workers:
            await trio.sleep(30)
            worker.kv = 120
        await trio.sleep(100)
        assert [len(worker.asked) for worker in workers] == [1, 1, 1, 0]
        nursery.cancel_scope.cancel()


async def test_leaving_while_a_request_moves_leaves_no_reservation(autojump_clock: MockClock) -> None:
    for after_s in (2.0, 3.999, 4.0, 4.001):
        async with routed(Memory("a", [SILENT], kv=50), Memory("b", [SILENT], kv=50, more=2)) as rig:
            with trio.move_on_after(after_s):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask, rig, generate())
                    await wait_all_tasks_blocked()
                    rig.worker("a").kv = 120


async def check_end_wakes_one_that_waits(routing: Routing, route: Route) -> None:
    """Check that a request which waits for a route has one as soon as another route ends."""
    got: list[Route] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(append_result, got, routing.wait_for_other, generate(), (), (), 0.0)
        await wait_all_tasks_blocked()
        assert not got
        route.end()
        await wait_all_tasks_blocked()
        assert [each.name for each in got] == ["a"], "nothing else has happened"
        got[0].end()


async def test_a_released_reservation_goes_at_once_to_a_request_that_waits(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", slots=1)) as rig:
        route = rig.routing.choose(generate())
        assert route is not None
        await check_end_wakes_one_that_waits(rig.routing, route)


async def test_the_end_of_a_probe_wakes_a_request_that_waits(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(ejection=Ejection(failures_max=1, ejected_s=1))
    async with routed(Fake("a"), Fake("b", slots=0), Fake("c", slots=0), limits=limits) as rig:
        rig.routing.failed("a", InternalError("a bug"))
        await trio.sleep(2)
        probing = rig.routing.choose(generate())
        assert probing is not None
        async with probing.ask(probing.decode, generate()):
            await check_end_wakes_one_that_waits(rig.routing, probing)


@pytest.mark.parametrize("_", range(20))  # who runs first in a turn is chance
async def test_a_request_moves_though_a_leg_fails_in_the_turns_in_which_it_is_taken_back(
    _: int, autojump_clock: MockClock
) -> None:
    p, q = (Memory(name, leg=Leg.PREFILL, info=prefill_info(name.encode()), kv=50) for name in "pq")
    d, e = (Memory(name, [SILENT], leg=Leg.DECODE, kv=50) for name in "de")
    p.plays, q.more, e.more, e.plays = [Play(HandOffFailed("cut"), 0)], 1, 1, []
    async with routed(p, q, d, e, limits=FailoverLimits(move_after_s=0.5)) as rig, trio.open_nursery() as nursery:
        await check_leaves(rig, nursery, d)


async def test_an_answer_that_an_engine_has_preempted_goes_on_elsewhere_once(autojump_clock: MockClock) -> None:
    gone = [Play(Preempted("for want of memory"), 2)]
    async with routed(Fake("a", [*gone]), Fake("b", more=2), Fake("c", more=3)) as rig:
        check_whole(await ask(rig, generate()), generate())
        assert not rig.routing.outliers
    async with routed(Fake("a", [*gone]), Fake("b", [*gone], more=2), Fake("c", more=3)) as rig:
        with pytest.raises(Preempted):
            await ask(rig, generate())
