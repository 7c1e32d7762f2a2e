"""Checks of grammars take fair turns, end when their askers leave, and their verdicts are kept within a bound."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from attrs import Factory, define
from trio.testing import MockClock

from actors.grammars import READY_WITHIN_S, GrammarChecks, GrammarChecksStatistics, grammars
from protocol.errors import EngineLost, NotReady, Overloaded, RequestError
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.operations import CheckGrammar, GrammarChecked
from supervisor.supervision.registration import Registration
from tests.rig.calls import AnyAddress, AnyAnswer, mailbox


@define(eq=False)
class Checker:
    """Takes as long for a grammar as its text says, in seconds; one that begins with `bad` is refused."""

    running: list[str] = Factory(list)
    begun: list[str] = Factory(list)
    left: list[str] = Factory(list)
    most: int = 0
    fails: RequestError | None = None

    @asynccontextmanager
    async def ask(self, request: CheckGrammar, credit: int) -> AsyncIterator[AnyAnswer]:
        name, _, seconds = request.grammar.text.partition(" ")
        self.running.append(name)
        self.begun.append(name)
        self.most = max(self.most, len(self.running))
        ended = False
        try:
            await trio.sleep(float(seconds))
            answer = AnyAnswer(credit)
            if self.fails is None:
                answer.end(GrammarChecked(refusal="no" if name.startswith("bad") else ""))
            else:
                answer.fail(self.fails)
            ended = True
            yield answer
        finally:
            self.running.remove(name)
            if not ended:
                self.left.append(name)


@define(eq=False)
class CheckerRig:
    checker: Checker
    address: AnyAddress
    outcomes: list[tuple[str, object]]

    async def check(self, text: str, owner: str = "alice") -> Any:
        async with self.address.ask(CheckGrammar(Grammar(GrammarKind.REGEX, text), owner), 0) as answer:
            return await answer.result()


@asynccontextmanager
async def running(
    checks_max: int = 2, waiting_max: int = 64, verdicts_max: int = 4, checker: Checker | None = None
) -> AsyncIterator[CheckerRig]:
    checker, outcomes = checker or Checker(), list[tuple[str, object]]()
    address, inbox = mailbox(16)
    registration = Registration[Any]()
    checks = GrammarChecks(
        registration.wait, checks_max, waiting_max, verdicts_max, lambda *ended: outcomes.append(ended)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(grammars, inbox, checks)
        with registration.publish(checker):
            yield CheckerRig(checker, address, outcomes)
        assert checks.statistics() == GrammarChecksStatistics(unfinished=0, waiting=0, running=0)
        nursery.cancel_scope.cancel()


async def test_a_verdict_is_remembered_and_the_oldest_forgotten(autojump_clock: MockClock) -> None:
    async with running() as rig:
        assert (await rig.check("bad 1")).refusal == "no"
        assert (await rig.check("bad 1", "bob")).refusal == "no"
        assert rig.checker.begun == ["bad"]
        for number in range(4):
            assert not (await rig.check(f"g{number} 1")).refusal
        await rig.check("bad 1")
        assert rig.checker.begun == ["bad", "g0", "g1", "g2", "g3", "bad"]
        assert [outcome for outcome, _ in rig.outcomes] == ["refused", *["accepted"] * 4, "refused"]


async def test_eight_heavy_ones_of_a_key_hold_no_other_key(autojump_clock: MockClock) -> None:
    took = {}

    async def timed(rig: CheckerRig, text: str, owner: str) -> None:
        began_at = trio.current_time()
        await rig.check(text, owner)
        took[text] = trio.current_time() - began_at

    async with running() as rig:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(timed, rig, f"heavy{number} 10", "greedy")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(timed, rig, "honest 0.1", "alice")
        assert took["honest 0.1"] == pytest.approx(0.1)
        assert rig.checker.most == 2
        assert max(took.values()) == pytest.approx(80.0)


async def test_a_check_without_askers_is_cancelled(autojump_clock: MockClock) -> None:
    async with running() as rig:
        with trio.move_on_after(1.5):
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(rig.check, f"heavy{number} 10")
        await trio.testing.wait_all_tasks_blocked()
        assert rig.checker.running == []
        assert len(rig.checker.left) == 1
        began_at = trio.current_time()
        await rig.check("honest 0.1")
        assert trio.current_time() - began_at == pytest.approx(0.1)
        assert rig.outcomes[0] == ("left", pytest.approx(1.5))


async def test_requests_for_the_same_check_share_it_until_the_last_has_left(autojump_clock: MockClock) -> None:
    async with running() as rig:
        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(3)]

            async def ask(scope: trio.CancelScope) -> None:
                with scope:
                    await rig.check("shared 10")

            for scope in scopes:
                nursery.start_soon(ask, scope)
            await trio.sleep(1)
            scopes[0].cancel()
            scopes[1].cancel()
            await trio.sleep(1)
            assert rig.checker.running == ["shared"]
            scopes[2].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert rig.checker.running == []
        assert rig.checker.begun == ["shared"]


async def test_one_owners_crowd_makes_room_in_a_full_line_for_another(autojump_clock: MockClock) -> None:
    async with running(checks_max=1, waiting_max=4) as rig, trio.open_nursery() as nursery:
        refused = []

        async def check_one(text: str, owner: str) -> None:
            try:
                await rig.check(text, owner)
            except Overloaded:
                refused.append(text)

        for number in range(5):
            nursery.start_soon(check_one, f"g{number} 5", "greedy")
            await trio.testing.wait_all_tasks_blocked()
        for text, owner in (("h1 1", "honest"), ("h2 1", "honest"), ("h3 1", "honest"), ("g5 1", "greedy")):
            nursery.start_soon(check_one, text, owner)
            await trio.testing.wait_all_tasks_blocked()
        assert refused == ["g4 5", "g3 5", "h3 1", "g5 1"], "whoever has most in line, and who would have"
        await trio.sleep(30)
        assert len(refused) == 4


async def test_a_checker_that_is_lost_or_away_is_no_verdict(autojump_clock: MockClock) -> None:
    async with running(checker=Checker(fails=EngineLost("gone"))) as rig:
        with pytest.raises(NotReady):
            await rig.check("a 1")
        rig.checker.fails = None
        assert not (await rig.check("a 1")).refusal  # nothing was remembered
    away = Registration[Any]()
    address, inbox = mailbox(1)
    async with trio.open_nursery() as nursery:
        await nursery.start(grammars, inbox, GrammarChecks(away.wait, 2, 4, 4, lambda *_: None))
        began_at = trio.current_time()
        with pytest.raises(NotReady):
            async with address.ask(CheckGrammar(Grammar(GrammarKind.REGEX, "a")), 0) as answer:
                await answer.result()
        assert trio.current_time() - began_at == READY_WITHIN_S
        nursery.cancel_scope.cancel()
