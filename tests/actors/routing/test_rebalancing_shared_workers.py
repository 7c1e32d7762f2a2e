"""Two routers ask the same workers, each hears of the other's requests late: neither is starved, no pair waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import trio
from attrs import Factory, define, field
from trio.testing import MockClock

from actors.engines.simulated.hand_off import HAND_OFF
from actors.router import router
from actors.routing.load import Load
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Finished, FinishReason, Generate, Started, Tokens, Usage
from supervisor.engines.work import request_inbox
from tests.rig.calls import AnyAddress, AnyAnswer
from tests.rig.router import FakePool, generate, met_at, prefill_info

TELL_S = 0.1
ANSWER_S = 1.0


@define(eq=False)
class Engine:
    """An engine with slots, which its waiting requests get in the order in which they came."""

    name: str
    slots: int
    leg: Leg = Leg.BOTH
    answer_s: float = ANSWER_S
    delays_s: dict[str, float] = Factory(dict)  # of requests on their way here, by router
    waiting: list[str] = Factory(list)
    most: int = 0
    free: trio.Semaphore = field(init=False)
    met: defaultdict[int, dict[Leg, trio.Event]] = field(init=False)  # by rendezvous room

    def __attrs_post_init__(self) -> None:
        self.free = trio.Semaphore(self.slots)

    async def compute(self, request: Generate, answer: AnyAnswer) -> None:
        await self.free.acquire()
        try:
            self.most = max(self.most, self.slots - self.free.value)
            if request.hand_off:
                both = self.met[met_at(request).room]
                both[self.leg].set()
                await both[Leg.DECODE if self.leg is Leg.PREFILL else Leg.PREFILL].wait()
            answer.put(Started(0), 0)
            await trio.sleep(TELL_S if self.leg is Leg.PREFILL else self.answer_s)
            answer.put(Tokens((7,)))
            answer.end(Finished(FinishReason.LENGTH, Usage(len(request.tokens), 1), None))
        finally:
            self.free.release()


@define(eq=False)
class View:
    """A worker as one router sees it: its own requests at once, those of the other as they were announced."""

    router: str
    engine: Engine
    nursery: trio.Nursery
    own: int = 0
    unstarted: set[str] = Factory(set)
    others: int = 0
    pool: FakePool = field(init=False)

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def leg(self) -> Leg:
        return self.engine.leg

    @property
    def info(self) -> EngineInfo | None:
        return prefill_info() if self.leg is Leg.PREFILL else None

    @property
    def full_name(self) -> str:
        return self.name

    @property
    def load(self) -> Load:
        busy, ours = (
            self.own + self.others,
            {"own": self.own, "unstarted": len(self.unstarted), "routers": 2, "place": int(self.router == "b")},
        )
        return Load(self.name, busy, self.engine.slots, leg=self.leg, **ours)

    def begun(self, request_id: str) -> None:
        if request_id in self.unstarted:
            self.unstarted.discard(request_id)
            self.pool.change()

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[AnyAnswer]:
        self.own += 1
        self.unstarted.add(request.id)
        answer, scope = AnyAnswer(credit), trio.CancelScope()
        self.nursery.start_soon(self._compute, request, answer, scope)
        try:
            yield answer
        finally:
            scope.cancel()
            answer.abandon()
            self.own -= 1
            self.unstarted.discard(request.id)
            self.pool.change()

    async def _compute(self, request: Generate, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(self.engine.delays_s.get(self.router, 0.0))
            await self.engine.compute(request, answer)


@define(eq=False)
class Shared:
    """Two routers, `a` and `b`, over the same engines."""

    addresses: dict[str, AnyAddress] = Factory(dict)
    ended: dict[str, list[float]] = field(factory=lambda: {"a": [], "b": []})  # when requests of each were answered
    _names: Any = field(factory=lambda: count(1))

    async def ask(self, name: str) -> None:
        request = generate(f"{name}{next(self._names)}", tokens_max=1)
        async with self.addresses[name].ask(request, 1) as answer:
            assert isinstance(await answer.relay(lambda _: None), Finished)
        self.ended[name].append(trio.current_time())

    async def ask_always(self, name: str) -> None:
        while True:
            await self.ask(name)


@asynccontextmanager
async def shared(*engines: Engine, move_after_s: float = 2.0) -> AsyncIterator[Shared]:
    rig, ids = Shared(), count(1)
    rooms: defaultdict[int, dict[Leg, trio.Event]] = defaultdict(lambda: {leg: trio.Event() for leg in Leg})
    views: dict[str, list[View]] = {}
    for engine in engines:
        engine.met = rooms

    async def announce() -> None:
        while True:
            await trio.sleep(TELL_S)
            for mine, other in zip(views["a"], views["b"], strict=True):
                mine.others, other.others = other.own, mine.own
            for view in (views["a"][0], views["b"][0]):
                view.pool.change()

    async with trio.open_nursery() as nursery:
        for name in "ab":
            views[name] = [View(name, engine, nursery) for engine in engines]
            pool = FakePool(list(views[name]), nursery)
            for view in views[name]:
                view.pool = pool
            rig.addresses[name], inbox = request_inbox(64)
            limits = FailoverLimits(move_after_s=move_after_s)
            new_id = partial(lambda name: f"{name} {next(ids)}", name)
            routing = Routing(pool, least_loaded, limits, partial(next, ids), new_id, 0, frozenset())
            routing.hand_offs = {"simulated": HAND_OFF}
            await nursery.start(router, inbox, routing)
        nursery.start_soon(announce)
        yield rig
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("slots", "engines"), [(1, 1), (2, 1), (4, 1), (3, 2), (8, 2)])
async def test_a_router_with_many_requests_leaves_another_its_share(
    slots: int, engines: int, autojump_clock: MockClock
) -> None:
    many = [Engine(f"e{number}", slots) for number in range(engines)]
    total = slots * engines
    async with shared(*many) as rig, trio.open_nursery() as nursery:
        for _ in range(4 * total):
            nursery.start_soon(rig.ask_always, "a")
        await trio.sleep(10)
        assert len(rig.ended["a"]) >= 9 * total, "alone it has all slots"
        for _ in range(4 * total):
            nursery.start_soon(rig.ask_always, "b")
        await trio.sleep(10)
        before = {name: len(times) for name, times in rig.ended.items()}
        await trio.sleep(30)
        counts = {name: len(times) - before[name] for name, times in rig.ended.items()}
        nursery.cancel_scope.cancel()
    assert sum(counts.values()) >= 0.9 * 30 * total / ANSWER_S, f"slots were left empty: {counts}"
    at_least = (slots // 2 or 0.5) * engines * 30 / ANSWER_S
    assert min(counts.values()) >= 0.85 * at_least, counts
    assert max(engine.most for engine in many) <= slots


async def test_two_requests_that_each_have_one_leg_of_a_pair_give_way(autojump_clock: MockClock) -> None:
    # Each reaches another leg first, and with one slot a leg neither could ever begin.
    prefill = Engine("p", 1, Leg.PREFILL, delays_s={"a": 0.01})
    decode = Engine("d", 1, Leg.DECODE, delays_s={"b": 0.01})
    async with shared(prefill, decode) as rig:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.ask, "a")
            nursery.start_soon(rig.ask, "b")
        assert trio.current_time() < 6


@pytest.mark.parametrize("slots", [1, 2, 8])
async def test_routers_that_share_a_pair_are_both_served(slots: int, autojump_clock: MockClock) -> None:
    engines = Engine("p", slots, Leg.PREFILL), Engine("d", slots, Leg.DECODE)
    async with shared(*engines) as rig, trio.open_nursery() as nursery:
        for name in "ab":
            for _ in range(3 * slots):
                nursery.start_soon(rig.ask_always, name)
            await trio.sleep(5)
        before = {name: len(times) for name, times in rig.ended.items()}
        await trio.sleep(60)
        counts = {name: len(times) - before[name] for name, times in rig.ended.items()}
        nursery.cancel_scope.cancel()
    assert min(counts.values()) >= 0.25 * sum(counts.values()), counts
    assert sum(counts.values()) >= 0.5 * 60 * slots / (ANSWER_S + TELL_S), counts
