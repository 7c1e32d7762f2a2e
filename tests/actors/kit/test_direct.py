"""Calls that are answered in the asker's task: an asker cannot tell, and the actor stays one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import BugCounter
from actors.kit.direct import DirectAddress, DirectCalls
from protocol.errors import ActorLost, InternalError, TooManyInternalErrors
from tests.rig.calls import AnyAnswer, AnyCall, mailbox, priority_inbox
from tests.rig.log_records import log_records

Serve = Callable[[AnyAnswer], Awaitable[Any]]


@define
class Actor:
    """An actor that answers each call by one function, `places` at a time, in whichever task."""

    serve: Serve
    places: int = 8
    bugs: BugCounter = field(factory=BugCounter)
    direct: DirectCalls[Any, Any, Any] = field(factory=DirectCalls)
    tasks: list[str] = field(factory=list)  # in which each call was answered
    address: DirectAddress[Any, Any, Any] = field(init=False)
    inbox: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        address, self.inbox = mailbox(4)
        self.address = DirectAddress(address.inbox, self.direct)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        free = trio.Semaphore(self.places)

        async def answer_one(call: AnyCall) -> None:
            self.tasks.append(trio.lowlevel.current_task().name)
            try:
                with call.answering(self.bugs) as answer:
                    answer.end(await self.serve(answer))
            finally:
                free.release()

        def begin(_: object) -> Any:
            try:
                free.acquire_nowait()
            except trio.WouldBlock:
                return None
            return answer_one

        async with trio.open_nursery() as calls, self.direct.answered(begin, calls):
            task_status.started()
            while True:
                await free.acquire()
                calls.start_soon(answer_one, await self.inbox.receive(), name="own task")


def nothing(_: object) -> None:
    pass


async def ask(actor: Actor, receiver: Callable[[Any], None] = nothing, ended: list[Any] | None = None) -> Any:
    async with actor.address.ask("a request", 9) as answer:
        result = await answer.relay(receiver)
    if ended is not None:
        ended.append(result)
    return result


@asynccontextmanager
async def running(actor: Actor) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        await nursery.start(actor.run)
        yield nursery
        nursery.cancel_scope.cancel()


async def two_replies(answer: AnyAnswer) -> str:
    answer.put("one")
    await trio.sleep(1)
    answer.put("two")
    return "result"


async def endless(answer: AnyAnswer) -> None:
    answer.put("one")
    await trio.sleep_forever()


async def buggy(_: AnyAnswer) -> None:
    await trio.lowlevel.checkpoint()
    raise KeyError("a bug")


async def test_a_relayed_call_is_answered_in_the_asker_s_task_and_an_iterated_one_beside_it(
    autojump_clock: MockClock,
) -> None:
    actor, replies = Actor(two_replies), list[str]()
    async with running(actor):
        async with trio.open_nursery() as askers:
            askers.start_soon(ask, actor, replies.append, name="asker")
        async with actor.address.ask("a request", 9) as answer:
            assert [reply async for reply in answer] == replies == ["one", "two"]
            assert await answer.result() == "result"
    assert actor.tasks == ["asker", "own task"]


async def test_a_relay_with_a_deadline_goes_through_the_inbox(autojump_clock: MockClock) -> None:
    actor = Actor(endless)
    async with running(actor), actor.address.ask("a request", 9) as answer:
        assert await answer.relay(nothing, lambda: 3.0) is None
        assert trio.current_time() == 3
    assert actor.tasks == ["own task"]


async def test_without_a_place_or_an_actor_the_call_waits_in_the_inbox(autojump_clock: MockClock) -> None:
    actor, results = Actor(two_replies, places=2), list[str]()
    async with trio.open_nursery() as askers:
        askers.start_soon(ask, actor, nothing, results)
        await wait_all_tasks_blocked()
        assert actor.inbox.statistics().current_buffer_used == 1  # nobody lives
        async with running(actor):
            await wait_all_tasks_blocked()
            for _ in range(3):
                askers.start_soon(ask, actor, nothing, results)
            await wait_all_tasks_blocked()
            assert len(actor.tasks) == 2
            assert actor.direct.running <= 1
            await trio.sleep(2.5)
    assert results == ["result"] * 4
    assert not actor.direct.running


async def test_calls_that_wait_in_a_fair_inbox_come_first(autojump_clock: MockClock) -> None:
    async def answer_one(_: AnyCall) -> None:
        """Stand for an answerer, which nobody runs here."""

    address, inbox = priority_inbox(2, lambda _: 0)
    direct: DirectCalls[Any, Any, Any] = DirectCalls(inbox.pass_by)
    async with trio.open_nursery() as nursery:
        async with direct.answered(lambda _: answer_one, nursery):
            assert direct.begin("a request") is answer_one
            nursery.start_soon(_ask_and_leave, address)
            await wait_all_tasks_blocked()
            assert direct.begin("a request") is None
        assert direct.begin("a request") is None
        nursery.cancel_scope.cancel()


async def _ask_and_leave(address: Any) -> None:
    async with address.ask("a request", 9) as answer:
        await answer.result()


async def test_leaving_cancels_the_call(autojump_clock: MockClock) -> None:
    actor, replies = Actor(endless), list[str]()
    async with running(actor):
        with trio.move_on_after(1) as left:
            await ask(actor, replies.append)
        assert left.cancelled_caught
        assert not actor.direct.running
        assert replies == ["one"]
        async with actor.address.ask("a request", 9) as answer:
            pass  # never relayed, so never begun
        assert answer.over.is_set()
    assert len(actor.tasks) == 1


async def test_what_the_receiver_raises_is_raised_by_the_relay_and_is_no_bug_of_the_actor(
    autojump_clock: MockClock,
) -> None:
    def refuse(_: str) -> None:
        raise ValueError("not this")

    actor = Actor(two_replies, bugs=BugCounter(bugs_max=0))
    async with running(actor):
        with pytest.raises(ValueError, match="not this"):
            await ask(actor, refuse)
        assert not actor.direct.running
        assert await ask(actor) == "result"


async def test_the_end_of_the_actor_ends_its_calls_before_the_actor_has_ended(autojump_clock: MockClock) -> None:
    cleaned, errors = list[str](), list[Exception]()

    async def untidy(_: AnyAnswer) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append("call")

    async def asker() -> None:
        with pytest.raises(ActorLost) as lost:
            await ask(actor)
        errors.append(lost.value)

    actor = Actor(untidy)
    async with trio.open_nursery() as askers:
        with trio.CancelScope() as life:
            async with running(actor):
                for _ in range(3):
                    askers.start_soon(asker)
                await wait_all_tasks_blocked()
                assert actor.direct.running == 3
                life.cancel()
                await trio.sleep_forever()
        assert cleaned == ["call"] * 3
        assert not actor.direct.running
    assert len(errors) == 3


async def test_an_actor_waits_only_so_long_for_a_call_that_does_not_end(autojump_clock: MockClock) -> None:
    async def stuck(_: AnyAnswer) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(60)

    actor = Actor(stuck)
    async with trio.open_nursery() as askers:
        async with running(actor):
            askers.start_soon(ask, actor)
            await wait_all_tasks_blocked()
        assert trio.current_time() == 2


async def test_a_bug_fails_its_call_and_one_too_many_the_actor_but_no_asker(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    actor = Actor(buggy, bugs=BugCounter(bugs_max=1))
    async with trio.open_nursery() as nursery:
        with pytest.raises(ExceptionGroup) as failed:  # the actor fails inside
            async with running(actor):
                for _ in range(2):
                    with pytest.raises(InternalError):
                        await ask(actor)
                await trio.sleep_forever()
        nursery.cancel_scope.cancel()
    assert failed.group_contains(TooManyInternalErrors, depth=2)
    assert [record.message for record in log_records(caplog)] == ["a bug failed a request"] * 2


async def test_a_bug_while_the_asker_leaves_is_counted_and_does_not_reach_the_asker(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaves_badly(_: AnyAnswer) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("a bug in the cleanup")

    actor = Actor(leaves_badly, bugs=BugCounter(bugs_max=1))
    async with running(actor):
        with trio.move_on_after(1) as left:
            await ask(actor)
        assert left.cancelled_caught
    assert [record.message for record in log_records(caplog)] == ["a bug failed a request"]
    with pytest.raises(TooManyInternalErrors, match="2 bugs"):
        actor.bugs.count(KeyError("another"))
