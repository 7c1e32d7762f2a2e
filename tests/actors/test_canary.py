"""The canary: an idle engine is asked for a whole answer, and nobody else ever notices."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from math import inf
from typing import Any

import pytest
import trio
from attrs import Factory, define
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.canary import (
    ANSWERED,
    FAILED,
    LATE,
    YIELDED,
    CanaryLimits,
    CanaryObserver,
    canary,
    canary_request,
)
from actors.decode import decode
from actors.engines.port import Generation
from actors.engines.simulated.hand_off import HAND_OFF
from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.step import BatchUpdate
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import Slots
from actors.kit.calls import Answer
from actors.kit.groups import first_of
from protocol.errors import (
    ActorError,
    EngineDied,
    EngineLost,
    EngineRefused,
    EngineStuck,
    RequestError,
)
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad, HandOff
from protocol.messages.generation import Finished, FinishReason, Generate, Started, Tokens, Usage
from tests.rig.calls import AnyAddress, priority_inbox
from tests.rig.fake_engine import Costs, FakeEngine, Scheduler, generate
from tests.rig.scheduler import sweep
from tests.rig.tasks import append_result
from tests.system.simulator import counting, tasks

LIMITS = CanaryLimits(after_s=10.0, within_s=8.0)
DEADLINES = Deadlines(first_token_s=60, gap_s=20, total_s=600, release_s=5, leak_s=300, stuck_max=3)


@define(eq=False)
class Recorder(CanaryObserver):
    """The outcomes of canaries, with the time at which each was over."""

    outcomes: list[tuple[float, str]] = Factory(list)
    seconds: list[float] = Factory(list)

    def ended(self, rank: int, outcome: str, seconds: float) -> None:
        assert rank == 0
        self.outcomes.append((trio.current_time(), outcome))
        self.seconds.append(seconds)


@define(eq=False)
class Watched:
    """An engine with a decode and a canary, and what they have asked."""

    engine: Any
    slots: Slots
    address: AnyAddress
    observer: Recorder = Factory(Recorder)
    raised: list[BaseException] = Factory(list)
    scope: trio.CancelScope = Factory(trio.CancelScope)
    serves: bool = True
    over: trio.Event = Factory(trio.Event)  # when decode and canary have ended

    async def ask(self, wanted: Generate) -> list[int]:
        async with self.address.ask(wanted, wanted.sampling.tokens_max) as replies:
            return [token async for reply in replies if isinstance(reply, Tokens) for token in reply.ids]


@asynccontextmanager
async def watched(
    engine: Any = None, slots: int = 2, limits: CanaryLimits = LIMITS, deadlines: Deadlines = DEADLINES
) -> AsyncIterator[Watched]:
    """Run an engine with its decode and its canary; what ends those is kept, as a supervisor would."""
    engine = engine or FakeEngine(Costs(slots=slots))
    address, inbox = priority_inbox(16, lambda _: 0)
    numbers = count(1)
    system = Watched(engine, Slots(engine, slots, deadlines), address)
    system.slots.in_service = lambda: system.serves

    async def actors() -> None:
        try:
            with system.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(decode, inbox, [system.slots])
                    new_id = lambda: f"c{next(numbers)}"  # noqa: E731
                    nursery.start_soon(
                        canary, system.slots, limits, new_id, numbers.__next__, HAND_OFF, system.observer
                    )
        except* (EngineStuck, EngineDied) as group:
            system.raised += group.exceptions
        finally:
            system.over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        nursery.start_soon(actors)
        await wait_all_tasks_blocked()
        yield system
        nursery.cancel_scope.cancel()


def submitted(engine: FakeEngine) -> list[str]:
    """Return the ids of all requests, those of canaries among them."""
    return [line.split()[1] for line in engine.log if line.startswith("submit ")]


def error_of(system: Watched) -> BaseException:
    [error] = system.raised
    return (first_of(error, ActorError) if isinstance(error, Exception) else None) or error


# An engine that answers --------------------------------------------------------------------


class Compiling(FakeEngine):
    """Answers nothing while a compiler runs."""

    until: float
    reports: bool = True

    async def held_up(self) -> bool:
        await trio.lowlevel.checkpoint()
        return self.reports and trio.current_time() < self.until

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await trio.sleep_until(self.until)
        await super().run(task_status=task_status)


async def test_a_canary_waits_for_a_compiler_and_no_longer(autojump_clock: MockClock) -> None:
    engine = Compiling(Costs(slots=2))
    engine.until = 100.0
    async with watched(engine) as system:
        await trio.sleep(105)
        assert (system.observer.outcomes, system.raised) == ([(101, ANSWERED)], [])
    silent = Compiling(Costs(slots=2))
    silent.until, silent.reports = inf, False
    async with watched(silent) as system:
        began_at = trio.current_time()
        await system.over.wait()
        assert [(ended_at - began_at, outcome) for ended_at, outcome in system.observer.outcomes] == [(18, LATE)]


async def test_an_idle_engine_is_asked_again_and_again_and_a_busy_one_never(autojump_clock: MockClock) -> None:
    async with watched() as system:
        await trio.sleep(35)
        assert system.observer.outcomes == [(11, ANSWERED), (22, ANSWERED), (33, ANSWERED)]
        assert system.observer.seconds == [1, 1, 1]
        assert len(await system.ask(generate(tokens_max=60))) == 60  # until 95
        assert len(system.observer.outcomes) == 3
        await trio.sleep(9)
        assert len(system.observer.outcomes) == 3, "the time without a request is not over"
        await trio.sleep(3)
        assert system.observer.outcomes[3:] == [(106, ANSWERED)]
        assert await system.engine.load() == EngineLoad(0, 0, 0)
        assert system.slots.free.value == 1, "decode holds one in advance"


@pytest.mark.parametrize("hand_off", [HandOff.CONCURRENT, HandOff.SEQUENTIAL])
@pytest.mark.parametrize(("leg", "tokens"), [(Leg.PREFILL, 1), (Leg.DECODE, 2)])
async def test_a_leg_of_a_pair_answers_its_canary_without_the_other(
    leg: Leg, tokens: int, hand_off: HandOff, autojump_clock: MockClock
) -> None:
    async with watched(FakeEngine(Costs(leg=leg, hand_off=hand_off, slots=2))) as system:
        request = canary_request(system.engine.info, "a", "b", b"alone")
        assert request.hand_off == b"alone"
        assert request.sampling.tokens_max == tokens, "the first token of a decode is computed elsewhere"
        await trio.sleep(30)
        assert [outcome for _, outcome in system.observer.outcomes] == [ANSWERED] * 2
        assert await system.engine.load() == EngineLoad(0, 0, 0)
        assert not system.raised


async def test_a_sequential_prefill_whose_canary_gets_no_state_is_found(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(leg=Leg.PREFILL, hand_off=HandOff.SEQUENTIAL, slots=2))) as system:
        system.engine.stall(60)
        await trio.sleep(30)
        assert [outcome for _, outcome in system.observer.outcomes] == [LATE]
        assert isinstance(error_of(system), EngineStuck)


# An engine that does not -------------------------------------------------------------------


async def test_an_engine_that_stalls_while_it_is_idle_is_found_within_the_time_of_a_canary(
    autojump_clock: MockClock,
) -> None:
    async with watched() as system:
        await trio.sleep(3)
        system.engine.stall(inf)
        await trio.sleep(14.9)
        assert not system.raised
        await trio.sleep(0.2)
        assert str(error_of(system)) == "its canary got no whole answer within 8 s"
        assert isinstance(error_of(system), EngineStuck)
        assert system.observer.outcomes == [(18, LATE)]


class Halting(Scheduler):
    """Gives no request more than one token."""

    def _begin(self, held: HeldRequest, update: BatchUpdate) -> None:
        super()._begin(held, update)
        self.silent.add(held.request.id)


class HaltingEngine(FakeEngine):
    scheduler_of: type[Scheduler] = Halting


async def test_an_answer_that_begins_and_does_not_end_is_none(autojump_clock: MockClock) -> None:
    async with watched(HaltingEngine(Costs(leg=Leg.DECODE, slots=2))) as system:
        await trio.sleep(18.1)
        assert system.observer.outcomes == [(18, LATE)]
        assert str(error_of(system)) == "its canary got no whole answer within 8 s"


class Answering(FakeEngine):
    """Answers every request at once, as a test wants it."""

    def __init__(self, end: Callable[[Any], None], *, refuses: RequestError | None = None) -> None:
        super().__init__(Costs(slots=2))
        self.end, self.refuses = end, refuses

    def submit(self, request: Generate) -> Generation:
        if self.refuses is not None:
            raise self.refuses
        answer: Answer[Started | Tokens, Finished] = Answer(request.sampling.tokens_max)
        answer.put(Started(), 0)
        self.end(answer)
        return answer


@pytest.mark.parametrize(
    ("engine", "sentence", "kind"),
    [
        (
            Answering(lambda answer: answer.end(Finished(FinishReason.LENGTH, Usage(1, 0)))),
            "its canary failed: internal: it ended without a token",
            EngineStuck,
        ),
        (
            Answering(lambda answer: answer.fail(EngineRefused("no"))),
            "its canary failed: engine_refused: no",
            EngineStuck,
        ),
        (Answering(lambda _: None, refuses=EngineLost("")), "the engine is lost", EngineDied),
    ],
)
async def test_an_answer_that_is_an_error_or_nothing_ends_the_engine(
    engine: Answering, sentence: str, kind: type[Exception], autojump_clock: MockClock
) -> None:
    async with watched(engine) as system:
        await trio.sleep(11)
        assert (str(error_of(system)), type(error_of(system))) == (sentence, kind)
        assert [outcome for _, outcome in system.observer.outcomes] == ([FAILED] if kind is EngineStuck else [])
        assert system.slots.probe is None


async def test_a_process_that_was_stopped_itself_does_not_blame_the_engine(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=2, step_s=3))) as system:
        await trio.sleep(11)
        autojump_clock.jump(1000)  # all timers that were due meanwhile fire at once
        system.engine.stall(1.5)  # and its answer needs a moment, too
        await trio.sleep(4)
        assert [outcome for _, outcome in system.observer.outcomes] == [ANSWERED]
        assert not system.raised


# A canary and requests ---------------------------------------------------------------------


async def test_a_canary_yields_its_only_slot_to_the_first_request(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=1, step_s=4, release_s=0.5)), slots=1) as system:
        await trio.sleep(11)
        assert len(await system.ask(generate(tokens_max=2))) == 2
        assert trio.current_time() == 22, "two steps after the one that was being computed"
        assert system.observer.outcomes == [(11.5, YIELDED)]
        assert system.engine.log[1:4] == ["abort c1", "released c1", "submit r"], "never more requests than slots"
        await trio.sleep(20)
        assert system.observer.outcomes[1:] == [(36, ANSWERED)]
        assert not system.raised


async def test_a_request_waits_for_no_canary_while_there_is_another_slot(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=2, step_s=4, release_s=3))) as system, trio.open_nursery() as nursery:
        await trio.sleep(11)
        got: list[list[int]] = []
        nursery.start_soon(append_result, got, partial(system.ask, generate("r1")))
        await wait_all_tasks_blocked()
        assert system.engine.log == ["submit c1", "submit r1", "abort c1"]
        nursery.start_soon(append_result, got, partial(system.ask, generate("r2")))
        await wait_all_tasks_blocked()
        assert "submit r2" not in system.engine.log, "the second one needs the canary's slot"
        await trio.sleep(3.1)
        assert system.engine.log[-2:] == ["released c1", "submit r2"]
        await trio.sleep(30)
        assert [len(tokens) for tokens in got] == [3, 3]
        assert system.slots.free.value == 1


async def test_a_canary_whose_slot_is_kept_is_a_stuck_slot_like_any_other(autojump_clock: MockClock) -> None:
    costs = Costs(slots=4, step_s=4, stuck=True)
    async with watched(FakeEngine(costs), slots=4) as system:
        await trio.sleep(11)
        await system.ask(generate("r1"))
        assert set(system.slots.stuck) == {"c1"}
        assert not system.raised, "one stuck slot costs no other stream"
        await trio.sleep(30)
        assert system.slots.idle_since is None
        costs.stuck = False
        await system.ask(generate("r2"))
        await trio.sleep(10)
        assert not system.slots.stuck
        await trio.sleep(20)
        assert [outcome for _, outcome in system.observer.outcomes][:2] == [YIELDED, ANSWERED]


async def test_a_request_that_waits_for_a_slot_of_a_canary_may_leave(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=1, step_s=4, release_s=2)), slots=1) as system:
        await trio.sleep(11)
        with trio.move_on_after(1):
            await system.ask(generate("r1"))
        await trio.sleep(5)
        assert "submit r1" not in system.engine.log
        assert len(await system.ask(generate("r2"))) == 3
        assert not system.raised


# Out of service ----------------------------------------------------------------------------


async def test_an_engine_out_of_service_has_no_canary_and_no_new_request(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=2, step_s=4))) as system:
        await trio.sleep(11)
        system.serves = False
        system.slots.cancel_probe("it is out of service")
        await trio.sleep(100)
        assert system.observer.outcomes == [(11, YIELDED)]
        assert submitted(system.engine) == ["c1"]
        system.serves = True
        await trio.sleep(30)
        assert {outcome for _, outcome in system.observer.outcomes[1:]} == {ANSWERED}
        assert not system.raised


# Nothing leaks -----------------------------------------------------------------------------


async def cancel_one(_: random.Random, step: int) -> bool:
    """End the actors just before the step; return whether the canaries had been over by then."""
    async with watched(FakeEngine(Costs(slots=1, step_s=0.4, release_s=0.3, leg=Leg.DECODE)), slots=1) as system:
        canaries = 2
        with counting(step, partial(system.scope.cancel, reason="sweep")) as steps:
            with trio.move_on_after(LIMITS.after_s * canaries + 5):
                await trio.sleep_forever()
        await trio.sleep(1)
        ended = system.scope.cancel_called
        assert not ended or not {"canary", "decode"} & {name.rpartition(".")[2] for name in tasks()}
        system.scope.cancel()
        await trio.sleep(1)
        assert await system.engine.load() == EngineLoad(0, 0, 0)
        assert (system.slots.probe, system.slots.stuck) == (None, {})
        assert not system.raised
    return steps.taken < step


async def test_a_canary_that_is_cancelled_ends_when_the_engine_has_released_it(autojump_clock: MockClock) -> None:
    async with watched(FakeEngine(Costs(slots=1, step_s=4, release_s=3)), slots=1) as system:
        await trio.sleep(11)
        system.scope.cancel()
        await system.over.wait()
        assert trio.current_time() == 14
        assert await system.engine.load() == EngineLoad(0, 0, 0)
        assert not system.raised


def test_a_canary_that_is_cancelled_at_any_step_leaves_nothing() -> None:
    sweep(cancel_one, steps_min=12)


async def leave_one(_: random.Random, step: int) -> bool:
    """Let a request come just before the step, whatever the canary does there; return whether that was too late."""
    engine = FakeEngine(Costs(slots=1, step_s=0.4, release_s=0.3))
    async with watched(engine, slots=1) as system, trio.open_nursery() as nursery:
        got: list[list[int]] = []
        came = trio.Event()

        async def come() -> None:
            await came.wait()
            got.append(await system.ask(generate()))

        nursery.start_soon(come)
        await wait_all_tasks_blocked()
        with counting(step, came.set) as steps:
            await trio.sleep(LIMITS.after_s * 2 + 5)
        over = steps.taken < step
        came.set()
        await trio.sleep(5)
        assert [len(tokens) for tokens in got] == [3]
        assert not system.raised
        running: set[str] = set()
        for line in engine.log:  # one slot, one request
            word, name = line.split()
            running = running | {name} if word == "submit" else running - {name} if word != "abort" else running
            assert len(running) <= 1, engine.log
        await trio.sleep(20)
        assert await engine.load() == EngineLoad(0, 0, 0)
        assert YIELDED not in {outcome for _, outcome in system.observer.outcomes[2:]}
    return over


def test_a_request_that_comes_at_any_step_of_a_canary_is_answered() -> None:
    sweep(leave_one, steps_min=12)
