"""Calls of several groups in one inbox: a head that does not fit holds up its own group, and one number bounds all."""

from __future__ import annotations

from functools import partial
from typing import Any

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from protocol.errors import NotReady
from tests.rig.calls import AnyAnswer, AnyCall, AnyPriorityInbox


def call(group: str, name: object = "", priority: int = 0, owner: str = "") -> AnyCall:
    return AnyCall((group, name, priority, owner), AnyAnswer(0))


def is_of(group: str, request: Any) -> bool:
    return bool(request[0] == group)


def new_inbox(size: int = 10) -> AnyPriorityInbox:
    return AnyPriorityInbox(
        size, lambda request: request[2], lambda request: request[3], group=lambda request: request[0]
    )


async def taken(inbox: AnyPriorityInbox, *fit: str) -> Any:
    """Return the name of the next call whose group is one of these, None if there is none."""
    with trio.move_on_after(1):
        return (await inbox.receive(lambda request: request[0] in fit)).request[1]
    return None


async def test_a_call_that_does_not_fit_holds_up_its_own_group_alone(autojump_clock: MockClock) -> None:
    inbox = new_inbox()
    for number, group in enumerate("aabab"):
        await inbox.send(call(group, number))
    assert [await taken(inbox, "b") for _ in range(3)] == [2, 4, None]
    assert inbox.waiting_by_group() == {"a": 3}
    assert [await taken(inbox, "a", "b") for _ in range(4)] == [0, 1, 3, None]
    assert inbox.waiting == (0, 0)
    assert inbox.waiting_by_group() == {}


async def test_the_calls_of_all_groups_are_bounded_together(autojump_clock: MockClock) -> None:
    inbox = new_inbox(2)
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(inbox.send, call("full", number))
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(inbox.send, call("idle", "other"))
        await trio.testing.wait_all_tasks_blocked()
        assert inbox.waiting == (2, 2)
        assert await taken(inbox, "idle") == "other", "it is taken though there was no room for it"
        assert inbox.waiting == (2, 1)
        assert [await taken(inbox, "full") for _ in range(3)] == [0, 1, 2]


async def test_a_call_of_one_group_passes_by_the_calls_of_others(autojump_clock: MockClock) -> None:
    inbox = new_inbox()
    await inbox.send(call("a"))
    assert not inbox.pass_by(("a", "", 0, ""))
    assert inbox.pass_by(("b", "", 0, ""))
    assert inbox.waiting_by_group() == {"a": 1}


async def test_a_receiver_of_one_group_is_not_woken_by_calls_of_others(autojump_clock: MockClock) -> None:
    inbox, looked, got = new_inbox(), list[tuple[str, object]](), list[tuple[str, object]]()

    async def receive(group: str) -> None:
        def fits(request: Any) -> bool:
            looked.append((group, request[1]))
            return request[1] in fitting

        while True:
            got.append((group, (await inbox.receive(fits, group)).request[1]))

    fitting = {1, 2}
    async with trio.open_nursery() as nursery:
        for group in "abcd":
            nursery.start_soon(receive, group)
        for number, group in enumerate("abc"):
            await inbox.send(call(group, number))
            await trio.testing.wait_all_tasks_blocked()
        assert (looked, got) == ([("a", 0), ("b", 1), ("c", 2)], [("b", 1), ("c", 2)])
        fitting.add(0)
        inbox.recheck("b")
        await trio.testing.wait_all_tasks_blocked()
        assert got[2:] == []
        inbox.recheck("a")
        await trio.testing.wait_all_tasks_blocked()
        assert got[2:] == [("a", 0)]
        behind, last = call("d", 3), call("d", 4)
        await inbox.send(behind)
        fitting.add(4)
        await inbox.send(last)
        behind.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert got[3:] == [("d", 4)]
        await inbox.send(call("a", 5))
        fitting.add(5)
        inbox.recheck()
        await trio.testing.wait_all_tasks_blocked()
        assert got[4:] == [("a", 5)]
        nursery.cancel_scope.cancel()


async def test_all_groups_are_turned_away(autojump_clock: MockClock) -> None:
    inbox = new_inbox(1)
    calls = [call(group) for group in "aabbc"]
    async with trio.open_nursery() as nursery:
        for each in calls:
            nursery.start_soon(inbox.send, each)
        await trio.testing.wait_all_tasks_blocked()
        inbox.turn_away(NotReady("gone"))
    assert all(isinstance(each.answer.failure, NotReady) for each in calls)
    assert inbox.waiting == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=30), st.data())
def test_each_call_is_taken_once_and_in_the_order_of_its_group(
    wanted: list[tuple[str, int, bool]], data: st.DataObject
) -> None:
    async def main() -> None:
        inbox, calls = new_inbox(5), [call(group, n, priority) for n, (group, priority, _) in enumerate(wanted)]
        got: list[Any] = []
        async with trio.open_nursery() as nursery:
            for each in calls:
                nursery.start_soon(inbox.send, each)
                await trio.testing.wait_all_tasks_blocked()
            for each, (_, _, leaves) in zip(calls, wanted, strict=True):
                if leaves:
                    each.leave()
            stay = [each.request for each, (_, _, leaves) in zip(calls, wanted, strict=True) if not leaves]
            while len(got) < len(stay):
                fit = {request[0] for request in stay if request not in got}
                chosen = data.draw(st.sampled_from(sorted(fit)))
                got.append((await inbox.receive(partial(is_of, chosen))).request)
            inbox.turn_away(NotReady("over"))
        for group in "abc":
            expected = sorted((each for each in stay if each[0] == group), key=lambda each: (-each[2], each[1]))
            assert [each for each in got if each[0] == group] == expected

    trio.run(main)
