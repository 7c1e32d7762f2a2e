"""An engine behind a link: control operations leave the host's streams to requests, and silence is noticed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any, cast

import pytest
import trio
from attrs import define, evolve
from trio.testing import MockClock

from actors.engines.hosted_engine import CONTROLS_MAX, HostedEngine
from protocol.errors import EngineLost, Unsupported
from protocol.messages.engine import Alive, Done, EngineLoad, GetLoad, Ping
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache, GetMetrics
from tests.rig.calls import AnyAnswer
from tests.rig.gateway import INFO
from tests.rig.tasks import append_result, call_later


@define(eq=False)
class Slow:
    """A link to a host that takes a second for each answer."""

    open: int = 0
    most: int = 0

    @asynccontextmanager
    async def ask(self, request: GetLoad, credit: int) -> AsyncIterator[AnyAnswer]:
        self.open += 1
        self.most = max(self.most, self.open)
        answer = AnyAnswer(credit)
        await trio.sleep(1)
        answer.end(EngineLoad(0, 0, 0))
        try:
            yield answer
        finally:
            self.open -= 1


def engine_over(link: object) -> HostedEngine:
    return HostedEngine(cast("Any", link), cast("Any", None))


async def test_however_many_ask_for_its_load_few_streams_are_taken_and_all_are_answered(
    autojump_clock: MockClock,
) -> None:
    link, loads = Slow(), list[EngineLoad]()
    async with trio.open_nursery() as nursery:
        engine = engine_over(link)
        for _ in range(100):
            nursery.start_soon(append_result, loads, engine.load)
    assert (link.most, len(loads)) == (CONTROLS_MAX, 100)


# Whether it lives -------------------------------------------------------------------------


@define(eq=False)
class Living:
    """A link to a host whose scheduler answers after a while, or not at all from some moment on."""

    answers_in_s: float = 0.01
    stops_at: float = inf
    answer: Message = Alive()
    asked: int = 0

    @asynccontextmanager
    async def ask(self, request: Ping | FlushCache, credit: int) -> AsyncIterator[AnyAnswer]:
        assert request in {Ping(), FlushCache()}
        self.asked += 1
        answer = AnyAnswer(credit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer, request, answer)
            yield answer
            nursery.cancel_scope.cancel()

    async def _answer(self, request: Message, answer: AnyAnswer) -> None:
        await trio.sleep(self.answers_in_s)
        if trio.current_time() < self.stops_at:
            answer.end(self.answer if request == Ping() else Done())


@pytest.mark.parametrize("stopped_at", [0.0, 99.9, 101.0, 102.49])
async def test_an_engine_that_stops_answering_is_silent_within_silent_s(
    stopped_at: float, autojump_clock: MockClock
) -> None:
    link = Living(stops_at=stopped_at)
    await engine_over(link).wait_silent(10.0)
    assert 7.5 <= trio.current_time() - stopped_at <= 10.01
    assert link.asked <= 1 + trio.current_time() / 2.5, "it is asked a few times in that while, not all the time"


@pytest.mark.parametrize("held_up", [True, False])
async def test_an_engine_tells_whether_a_compiler_holds_it_up(held_up: bool, autojump_clock: MockClock) -> None:
    assert await engine_over(Living(answer=Alive(held_up))).held_up() is held_up


async def test_an_engine_that_answers_late_is_not_silent(autojump_clock: MockClock) -> None:
    link = Living(answers_in_s=7.4)
    with trio.move_on_after(1000) as patience:
        await engine_over(link).wait_silent(10.0)
    assert patience.cancelled_caught


async def test_a_node_that_stood_still_itself_does_not_hold_that_against_its_engine(
    autojump_clock: MockClock,
) -> None:
    link = Living(answers_in_s=5.0)
    with trio.move_on_after(1000) as patience:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_later, 1.0, autojump_clock.jump, 60.0)
            await engine_over(link).wait_silent(10.0)
    assert patience.cancelled_caught


async def test_waiting_for_silence_ends_with_the_link() -> None:
    class Lost:
        @asynccontextmanager
        async def ask(self, request: Ping, credit: int) -> AsyncIterator[AnyAnswer]:
            answer = AnyAnswer(credit)
            answer.fail(EngineLost("the link to the host is lost"))
            yield answer

    with pytest.raises(EngineLost):
        await engine_over(Lost()).wait_silent(10.0)


# Operations -------------------------------------------------------------------------------


async def test_an_operation_that_the_engine_does_not_list_is_refused_here(autojump_clock: MockClock) -> None:
    engine = HostedEngine(cast("Any", Living()), evolve(INFO, operations=("flush-cache",)))
    assert await engine.operate(FlushCache()) == Done()
    with pytest.raises(Unsupported, match="metrics"):
        await engine.operate(GetMetrics())
