"""A call, its answer, its relays, and what each end sees when the other ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import pytest
import trio
from attrs import frozen
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import BugCounter, CreditExceeded
from protocol.errors import (
    ActorLost,
    BadRequest,
    EngineStuck,
    EspalierError,
    InternalError,
    LinkLost,
    Overloaded,
    TooManyInternalErrors,
)
from tests.rig.calls import AnyAddress, AnyAnswer, AnyCall, mailbox
from tests.rig.log_records import log_records
from tests.rig.tasks import append_result, call_later
from tests.rig.watched_memory import Watched, uncollected
from tests.system.simulator import counting


@frozen
class Ask:
    id: str = "r"


def answer(credit: int = 100) -> AnyAnswer:
    return AnyAnswer(credit)


# Replies in order, then the end -----------------------------------------------------------


async def test_replies_come_in_order_and_then_the_result(autojump_clock: MockClock) -> None:
    source = answer()
    for reply in "abc":
        source.put(reply)
    source.end("done")
    assert [reply async for reply in source] == ["a", "b", "c"]
    assert await source.result() == "done"


async def test_a_failure_comes_after_the_replies_that_were_before_it(autojump_clock: MockClock) -> None:
    source, got = answer(), []
    source.put("a")
    source.fail(Overloaded("busy"))
    with pytest.raises(Overloaded, match="busy"):
        async for reply in source:
            got.append(reply)  # noqa: PERF401  # what came before the failure counts
    assert got == ["a"]
    with pytest.raises(Overloaded):
        await source.result()


async def test_cancelling_a_reader_loses_no_reply(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source = answer()
    with trio.move_on_after(1):
        await anext(source)
    source.put("a")
    assert await anext(source) == "a"


# Credit -----------------------------------------------------------------------------------


def test_an_answerer_cannot_put_more_than_the_credit() -> None:
    source = answer(3)
    source.put("ab", 2)
    with pytest.raises(CreditExceeded):
        source.put("cd", 2)
    source.put("c", 1)
    assert source.credit == 0
    source.put("started", 0)


async def test_a_relay_counts_credit_too(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    source, sink = answer(3), answer(1)
    nursery.start_soon(source.relay, sink.put)
    await wait_all_tasks_blocked()
    source.put("a")
    assert (source.credit, sink.credit) == (2, 0)


# Relays -----------------------------------------------------------------------------------


async def test_a_relay_runs_in_the_turn_of_the_put_and_wakes_no_task(nursery: trio.Nursery) -> None:
    first, second, third, got = answer(1000), answer(1000), answer(1000), list[int]()
    nursery.start_soon(first.relay, lambda reply: second.put(reply * 2), name="one")
    nursery.start_soon(second.relay, lambda reply: third.put(reply + 1), name="two")
    nursery.start_soon(third.relay, got.append, name="three")
    await wait_all_tasks_blocked()
    with counting() as steps:
        for number in range(500):
            first.put(number)
            assert got[-1] == number * 2 + 1
        await wait_all_tasks_blocked()
    assert not steps.by_name.keys() & {"one", "two", "three"}
    first.end("done")
    second.end("done")
    with counting() as steps:
        third.end("done")
        await wait_all_tasks_blocked()
    assert steps.by_name["three"] <= 2


async def test_replies_that_wait_precede_those_that_are_relayed(nursery: trio.Nursery) -> None:
    source, got = answer(), list[int]()
    source.put(1)
    source.put(2)
    nursery.start_soon(source.relay, got.append)
    await wait_all_tasks_blocked()
    source.put(3)
    assert got == [1, 2, 3]


async def test_an_error_in_a_relays_function_ends_the_relay_and_reaches_no_one_else(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source, neighbour, got, broken = answer(), answer(), list[int](), list[float]()

    def trips(reply: int) -> None:
        got.append(reply)
        if reply == 2:
            raise ZeroDivisionError

    async def relay() -> None:
        try:
            await source.relay(trips)
        except ZeroDivisionError:
            broken.append(trio.current_time())

    nursery.start_soon(relay)
    nursery.start_soon(neighbour.relay, got.append)
    await wait_all_tasks_blocked()
    for reply in (1, 2, 3):
        source.put(reply)  # whoever puts hears nothing of it
        neighbour.put(-reply)
    await wait_all_tasks_blocked()
    assert broken == [0]
    assert got == [1, -1, 2, -2, -3]


async def test_an_abandoned_answer_ends_its_relay_and_drops_further_replies(nursery: trio.Nursery) -> None:
    source, got, results = answer(3), list[int](), list[object]()
    nursery.start_soon(append_result, results, source.relay, got.append)
    await wait_all_tasks_blocked()
    source.put(1)
    source.abandon()
    source.put(2)
    await wait_all_tasks_blocked()
    assert (got, results) == ([1], [None])
    source.fail(Overloaded("nobody hears"))


async def test_a_relay_ends_at_its_deadline_which_is_evaluated_again_each_time(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    source, results, deadline = answer(), list[object](), [5]
    nursery.start_soon(append_result, results, source.relay, lambda _: None, lambda: deadline[0])
    await trio.sleep(4)
    deadline[0] = 7
    await trio.sleep(2.5)
    assert results == []
    await trio.sleep(0.75)
    assert results == [None]


async def test_a_result_that_is_there_is_returned_though_the_deadline_has_passed(autojump_clock: MockClock) -> None:
    source = answer()
    source.end("done")
    assert await source.relay(print, lambda: -1) == "done"


# A call and its answerer ------------------------------------------------------------------


async def serve(
    inbox: trio.MemoryReceiveChannel[AnyCall],
    serve_one: Callable[[Any, Any], Awaitable[None]],
    bugs: BugCounter | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    bugs = bugs or BugCounter()

    async def answer_call(call: AnyCall) -> None:
        with call.answering(bugs) as replies:
            await serve_one(call, replies)

    async with trio.open_nursery() as nursery:
        task_status.started()
        async for call in inbox:
            nursery.start_soon(answer_call, call)


async def served(
    nursery: trio.Nursery, serve_one: Callable[[Any, Any], Awaitable[None]], bugs: BugCounter | None = None
) -> AnyAddress:
    """Return the address of an actor that answers each call by a function."""
    address, inbox = mailbox(1)
    await nursery.start(serve, inbox, serve_one, bugs)
    return address


async def ask(address: AnyAddress, request: Ask | None = None, credit: int = 9) -> Any:
    async with address.ask(request or Ask(), credit) as replies:
        return await replies.result()


async def test_leaving_before_the_call_was_taken_leaves_it_cancelled_in_the_inbox(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    address, inbox = mailbox(1)
    with trio.move_on_after(1):
        await ask(address)
    call = inbox.receive_nowait()
    assert call.scope.cancel_called
    with call.answering(BugCounter()) as replies:
        await trio.sleep(1)  # the body does not go on
    assert replies.over.is_set()
    assert trio.current_time() == 1


async def test_a_bug_beside_the_error_of_a_request_is_logged_and_counted_too(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    async def both(call: AnyCall, replies: AnyAnswer) -> None:
        raise ExceptionGroup("two at once", [Overloaded("no room"), KeyError("a bug")])

    counted = BugCounter(bugs_max=1)
    address = await served(nursery, both, counted)
    with pytest.raises(Overloaded):
        await ask(address)
    assert [record.message for record in log_records(caplog)] == ["a bug failed a request"]
    with pytest.raises(TooManyInternalErrors, match="2 bugs"):
        counted.count(KeyError("another"))


async def test_leaving_a_full_inbox_leaves_nothing(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    address, inbox = mailbox(0)
    with trio.move_on_after(1):
        await ask(address)
    assert inbox.statistics().tasks_waiting_send == 0
    with pytest.raises(trio.WouldBlock):
        inbox.receive_nowait()


async def test_leaving_during_the_answer_cancels_the_answerer_in_the_same_turn(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    left = []

    async def forever(call: AnyCall, replies: AnyAnswer) -> None:
        try:
            await trio.sleep_forever()
        finally:
            replies.put("nobody takes this")
            left.append((trio.current_time(), call.answer.over.is_set()))

    address = await served(nursery, forever)
    with trio.move_on_after(2):
        await ask(address)
    await wait_all_tasks_blocked()
    assert left == [(2, False)]


async def test_an_answerer_is_cancelled_before_its_replies_are_dropped(nursery: trio.Nursery) -> None:
    seen = []

    async def busy(call: AnyCall, replies: AnyAnswer) -> None:
        while True:
            replies.put("x", 0)
            seen.append(call.scope.cancel_called)
            await trio.lowlevel.checkpoint()

    address = await served(nursery, busy)
    async with address.ask(Ask(), 0) as replies:
        await anext(replies)
    await wait_all_tasks_blocked()
    assert not any(seen)


async def test_leaving_after_the_end_changes_nothing(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def at_once(call: AnyCall, replies: AnyAnswer) -> None:
        replies.end("done")

    address = await served(nursery, at_once)
    async with address.ask(Ask(), 1) as replies:
        await trio.sleep(1)
    assert replies.over.is_set()
    assert await ask(address) == "done"


async def test_an_asker_that_leaves_does_not_disturb_its_neighbour(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def slowly(call: AnyCall, replies: AnyAnswer) -> None:
        await trio.sleep(3)
        replies.end(call.request.id)

    address = await served(nursery, slowly)
    with trio.move_on_after(1):
        await ask(address, Ask("left"))
    assert await ask(address, Ask("stays")) == "stays"
    assert trio.current_time() == 4


async def test_the_end_of_the_answerer_fails_the_call_with_actor_lost(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    address, inbox = mailbox(1)
    actor = trio.CancelScope()

    async def forever(call: AnyCall, replies: AnyAnswer) -> None:
        await trio.sleep_forever()

    async def run() -> None:
        with actor:
            await serve(inbox, forever)

    nursery.start_soon(run)
    nursery.start_soon(call_later, 2, actor.cancel)
    with pytest.raises(ActorLost):
        await ask(address)
    assert trio.current_time() == 2


async def test_a_body_that_ends_without_a_result_fails_the_call_with_actor_lost(nursery: trio.Nursery) -> None:
    async def forgets(call: AnyCall, replies: AnyAnswer) -> None:
        pass

    address = await served(nursery, forgets)
    with pytest.raises(ActorLost):
        await ask(address)


async def test_a_request_error_fails_its_call_alone(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async def picky(call: AnyCall, replies: AnyAnswer) -> None:
        if call.request.id == "bad":
            raise BadRequest("not this one", param="id")
        replies.end("fine")

    address = await served(nursery, picky)
    with pytest.raises(BadRequest, match="not this one") as caught:
        await ask(address, Ask("bad"))
    assert caught.value.param == "id"
    assert await ask(address) == "fine"


async def test_a_request_error_inside_groups_still_fails_its_call(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def nested(call: AnyCall, replies: AnyAnswer) -> None:
        async with trio.open_nursery() as legs, trio.open_nursery() as leg:
            legs.start_soon(trio.sleep_forever)
            leg.cancel_scope.deadline = 5
            raise LinkLost("one leg")

    address = await served(nursery, nested)
    with pytest.raises(LinkLost, match="one leg"):
        await ask(address)


IN_TRIO = pytest.mark.skipif(sys.version_info >= (3, 12), reason="a nursery of Trio keeps such a group: docs/known.md")


@pytest.mark.parametrize(
    "way", ["left", "failed", pytest.param("failed in a group", marks=IN_TRIO), "failed after it was left"]
)
async def test_nothing_that_an_answerer_held_waits_for_the_garbage_collector(
    way: str, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    alive: WeakSet[Watched] = WeakSet()

    async def hold(call: AnyCall, replies: AnyAnswer) -> None:
        held = Watched(b"pixels")
        alive.add(held)
        async with trio.open_nursery() as legs:
            legs.start_soon(trio.sleep_forever)
            try:
                await trio.sleep(2)
            finally:
                if way == "failed after it was left":
                    raise LinkLost("gone")
            if way == "failed":
                legs.cancel_scope.cancel()
            else:
                raise LinkLost("gone")
        raise LinkLost("gone")

    with uncollected():
        address = await served(nursery, hold)
        with trio.move_on_after(3 if way.startswith("failed") and "left" not in way else 1), suppress(LinkLost):
            await ask(address)
        await wait_all_tasks_blocked()
        assert len(alive) == 0


@pytest.mark.parametrize(
    "error", [EngineStuck("it kept its slot"), ExceptionGroup("", [LinkLost("x"), EngineStuck("y")])]
)
async def test_an_actor_error_ends_the_actor_whatever_rose_beside_it(
    error: EngineStuck | ExceptionGroup[EspalierError], autojump_clock: MockClock
) -> None:
    async def stuck(call: AnyCall, replies: AnyAnswer) -> None:
        raise error

    with pytest.RaisesGroup(pytest.RaisesExc(BaseException, check=lambda raised: "EngineStuck" in repr(raised))):
        async with trio.open_nursery() as nursery:
            address = await served(nursery, stuck)
            with pytest.raises((ActorLost, LinkLost)):
                await ask(address)


async def test_a_bug_fails_one_request_as_internal_and_is_logged_with_its_id(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def buggy(call: AnyCall, replies: AnyAnswer) -> None:
        replies.end(10 // (call.request.id != "unlucky"))

    address = await served(nursery, buggy)
    with pytest.raises(InternalError) as caught:
        await ask(address, Ask("unlucky"))
    assert "ZeroDivision" not in str(caught.value)
    (record,) = log_records(caplog)
    assert (record.levelno, record.request_id) == (logging.ERROR, "unlucky")
    assert record.exc_info[0] is ZeroDivisionError
    assert await ask(address) == 10


async def test_a_rate_of_bugs_ends_the_actor(autojump_clock: MockClock) -> None:
    async def buggy(call: AnyCall, replies: AnyAnswer) -> None:
        raise KeyError

    with pytest.RaisesGroup(pytest.RaisesGroup(TooManyInternalErrors)):
        async with trio.open_nursery() as nursery:
            address = await served(nursery, buggy, BugCounter(bugs_max=2, window_s=10))
            for _ in range(3):
                with pytest.raises(InternalError):
                    await ask(address)
