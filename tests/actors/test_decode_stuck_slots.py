"""Slots that an engine does not release: they cost a slot, then the engine, and never one engine after another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import pytest
import trio
from attrs import define, evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.port import Generation
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import Slots
from actors.kit.calls import Answer
from actors.kit.fast_path import FastPath
from actors.routing.route import FailoverLimits
from protocol.errors import DeadlineExceeded, EngineDied, EngineLost, EngineStuck, HandOffFailed, Preempted
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Finished, Generate, Started, Tokens
from protocol.messages.text import Text
from protocol.token_ids import TokenIds
from tests.actors.test_decode import Worker, ask, leave_after, working
from tests.rig.calls import priority_inbox
from tests.rig.fake_engine import Costs, FakeEngine, whole
from tests.rig.fake_engine import generate as wanted_of
from tests.rig.router import ActorWorker, Fake, Play, Received, RouterRig, prefill_info, routed
from tests.rig.router import ask as route
from tests.rig.tasks import append_result, call_later

DEADLINES = Deadlines(first_token_s=60, gap_s=20, total_s=600, release_s=5, leak_s=300, stuck_max=3)
HANGS = [13, 13, 13]  # a prompt under which every engine hangs


class Hanging(FakeEngine):
    """Answers some requests with nothing, and keeps their slots until it is healed; with `mute`, all requests."""

    def __init__(self, *names: str, slots: int = 8, mute: bool = False) -> None:
        super().__init__(Costs(slots=slots))
        self.names, self.mute = names, mute
        self.hung: dict[str, Generation | Answer[Started | Tokens, Finished]] = {}
        self.healed = trio.Event()
        self.held_up_until = -inf

    def submit(self, request: Generate) -> Generation | Answer[Started | Tokens, Finished]:
        answer = super().submit(request)
        if request.id in self.names or request.tokens.tolist() == HANGS:
            self.hung[request.id] = answer
            self.scheduler.waiting.popitem()  # the batch never hears of it
        return answer

    async def wait_released(self, request_id: str) -> None:
        if request_id in self.hung:
            await self.healed.wait()
        else:
            await super().wait_released(request_id)

    async def held_up(self) -> bool:
        await trio.lowlevel.checkpoint()
        return trio.current_time() < self.held_up_until

    async def load(self) -> EngineLoad:
        if self.mute:
            await trio.sleep_forever()
        return await super().load()


async def expect(error: type[EngineLost | DeadlineExceeded | Preempted], worker: Worker, wanted: Generate) -> None:
    with pytest.raises(error) as caught:
        await ask(worker, wanted)
    assert type(caught.value) is error


async def test_one_stuck_slot_touches_no_other_stream(autojump_clock: MockClock) -> None:
    async with working(engine=Hanging("bad"), slots=8, deadlines=DEADLINES) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(leave_after, worker, wanted_of("bad"), 1.5)
        wanted = wanted_of("good", tokens_max=200)
        assert await ask(worker, wanted) == whole(wanted)
        assert trio.current_time() == 200
        worker.engine.healed.set()


async def test_a_stuck_slot_is_one_slot_less_until_it_is_free(autojump_clock: MockClock) -> None:
    async with working(engine=Hanging("bad"), slots=2, deadlines=DEADLINES) as worker, trio.open_nursery() as nursery:
        await leave_after(worker, wanted_of("bad"), 1)
        await trio.sleep(6)
        for name in "ab":
            nursery.start_soon(ask, worker, wanted_of(name, tokens_max=10))
        await trio.sleep(5)
        assert len({"submit a", "submit b"} & {*worker.log}) == 1, "one slot is left"
        worker.engine.healed.set()
        await trio.sleep(2)
        assert {"submit a", "submit b"} < {*worker.log}, "it is there again"


@pytest.mark.parametrize(
    ("stuck", "slots", "mute", "left_s", "reason", "ends_at"),
    [
        pytest.param(["one", "two", "three"], 8, False, 10, "3 requests kept their slots for 5 s", 35, id="several"),
        pytest.param(["bad"], 1, False, 1, "1 requests", 6, id="all of its slots"),
        pytest.param(["bad"], 8, False, 1, "bad kept its slot for 300 s", 306, id="one that is never freed"),
        pytest.param(["bad"], 8, True, 1, "does not report its load", 11, id="one, and the engine is silent"),
    ],
)
async def test_stuck_slots_are_the_engines_fault(
    stuck: list[str], slots: int, mute: bool, left_s: float, reason: str, ends_at: float, autojump_clock: MockClock
) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(EngineStuck, match=reason), flatten_subgroups=True):
        async with working(engine=Hanging(*stuck, mute=mute), slots=slots, deadlines=DEADLINES) as worker:
            for name in stuck:
                await leave_after(worker, wanted_of(name), left_s)
            await trio.sleep_forever()
    assert trio.current_time() == ends_at


async def test_slots_that_a_compiler_holds_up_are_not_the_engines_fault_until_it_has_ended(
    autojump_clock: MockClock,
) -> None:
    engine = Hanging("one", "two", "three", "late", mute=True)
    engine.held_up_until = 200.0
    async with working(engine=engine, slots=8, deadlines=DEADLINES) as worker:
        for name in ("one", "two", "three"):
            await leave_after(worker, wanted_of(name), 1)
        await expect(EngineLost, worker, wanted_of("late"))
        await trio.sleep_until(190)
        engine.healed.set()
        assert await ask(worker, wanted_of("good", tokens_max=20)) == whole(wanted_of("good", tokens_max=20))
    engine = Hanging("one", "two", "three")
    ends_at = engine.held_up_until = trio.current_time() + 800  # longer than a slot may be kept
    with pytest.RaisesGroup(pytest.RaisesExc(EngineStuck, match="3 requests kept"), flatten_subgroups=True):
        async with working(engine=engine, slots=8, deadlines=DEADLINES) as worker:
            for name in ("one", "two", "three"):
                await leave_after(worker, wanted_of(name), 1)
            await trio.sleep_forever()
    assert ends_at + 5 < trio.current_time() <= ends_at + 15, "it has time to release them once the compiler has ended"


async def test_an_engine_that_answers_no_request_is_at_fault(autojump_clock: MockClock) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(EngineStuck, match="answers no request"), flatten_subgroups=True):
        async with working(engine=Hanging("bad"), slots=8, deadlines=DEADLINES) as worker:
            await expect(EngineLost, worker, wanted_of("bad"))
            assert trio.current_time() == 65
            await trio.sleep_forever()
    assert trio.current_time() == 65


# Behind a router --------------------------------------------------------------------------


@define(eq=False)
class Hung(ActorWorker):
    """A real decode over an engine that hangs under one prompt, started again whenever it was found stuck."""

    slots: int = 8
    killed: int = 0

    async def run(self) -> None:
        self.address, inbox = priority_inbox(8, lambda _: 0)
        while True:
            engine = Hanging()
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.run)
                    await decode(inbox, [Slots(engine, 8, DEADLINES)])
            except* (EngineStuck, EngineDied):
                self.killed += 1


@asynccontextmanager
async def over_hung(names: str) -> AsyncIterator[RouterRig]:
    """Run a router over workers with these names whose engines may hang."""
    async with routed(limits=FailoverLimits(resume_s=60)) as rig, trio.open_nursery() as nursery:
        rig.pool.all.extend(Hung(name, rig.pool) for name in names)
        for worker in rig.pool.all:
            nursery.start_soon(worker.run)
        await wait_all_tasks_blocked()
        rig.pool.change()
        yield rig
        nursery.cancel_scope.cancel()


async def ask_hostile(rig: RouterRig) -> None:
    with pytest.raises((EngineLost, DeadlineExceeded)):
        await route(rig, evolve(wanted_of("x", tokens_max=5), tokens=TokenIds.of(HANGS)))


async def test_a_request_that_hangs_engines_is_not_carried_from_one_to_the_next(autojump_clock: MockClock) -> None:
    async with over_hung("abcdef") as rig:
        await ask_hostile(rig)
        await trio.sleep(1000)
        assert sum(len(worker.asked) for worker in rig.pool.all) <= 2
        assert sum(worker.killed for worker in rig.pool.all) <= 2


async def test_the_neighbours_of_a_request_that_hangs_an_engine_go_on_elsewhere(autojump_clock: MockClock) -> None:
    """The engine stops for all: nobody can tell who is to blame, so each is carried on once."""
    got: list[Received] = []
    async with over_hung("ab") as rig, trio.open_nursery() as clients:
        clients.start_soon(ask_hostile, rig)
        for number in range(4):
            clients.start_soon(append_result, got, route, rig, wanted_of(f"h{number}", tokens_max=100))
    assert [received.finished.usage.completion_tokens for received in got] == [100] * 4


async def test_a_leg_that_does_not_let_go_of_a_request_counts_as_one_that_died(autojump_clock: MockClock) -> None:
    """The prefills hang, and the decodes say that the hand-off failed: each try costs another pair."""
    prefills = [Fake(f"p{n}", [Play(None, 0)], Leg.PREFILL, info=prefill_info(), release_s=1e6) for n in range(4)]
    decodes = [Fake(f"d{n}", [Play(HandOffFailed("late"), 0)], Leg.DECODE) for n in range(4)]
    async with routed(*prefills, *decodes, limits=FailoverLimits(resumes_max=20, pause_s=0.01)) as rig:
        with pytest.raises(HandOffFailed):
            await route(rig, wanted_of("a", tokens_max=5))
        assert [len(each.asked) for each in prefills] == [1, 1, 0, 0]


async def test_a_request_that_stands_still_while_others_go_on_was_preempted(autojump_clock: MockClock) -> None:
    async with working(slots=8, deadlines=DEADLINES) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(ask, worker, wanted_of("good", tokens_max=100))
        nursery.start_soon(call_later, 3.5, worker.engine.scheduler.silent.add, "bad")
        await expect(Preempted, worker, wanted_of("bad", tokens_max=50))
        assert trio.current_time() == 23


async def test_tokens_that_skip_the_decode_count_as_progress_of_the_others(autojump_clock: MockClock) -> None:
    async def ask_by_fast_path(worker: Worker, wanted: Generate, texts: list[str]) -> None:
        path = FastPath[Text](lambda text, _: texts.append(text.text))
        path.open({token: Text(str(token), 1) for token in range(100)})
        async with worker.address.ask(wanted, wanted.sampling.tokens_max) as answer:
            await answer.relay(lambda _: None, None, path)

    texts: list[str] = []
    async with working(slots=8, deadlines=DEADLINES) as worker, trio.open_nursery() as nursery:
        nursery.start_soon(ask_by_fast_path, worker, wanted_of("good", tokens_max=100), texts)
        await trio.sleep(15)  # so that no deadline of the good one comes shortly before that of the bad one
        nursery.start_soon(call_later, 3.5, worker.engine.scheduler.silent.add, "bad")
        await expect(Preempted, worker, wanted_of("bad", tokens_max=50))
        assert trio.current_time() == 38
    assert len(texts) == 99, "the first token goes the general way"
