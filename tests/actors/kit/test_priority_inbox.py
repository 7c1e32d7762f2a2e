"""A priority inbox: the most urgent call is next, then the first to come; none is lost or received twice."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.rig.calls import AnyAnswer, AnyCall, AnyPriorityInbox


def call(urgency: int, name: str | int = "") -> AnyCall:
    return AnyCall((urgency, name), AnyAnswer(0))


def new_inbox(size: int = 10) -> AnyPriorityInbox:
    return AnyPriorityInbox(size, lambda request: request[0])


async def test_an_asker_that_gives_up_leaves_its_room_to_the_next(autojump_clock: MockClock) -> None:
    inbox = new_inbox(1)
    await inbox.send(call(0, "first"))
    with trio.move_on_after(1):
        await inbox.send(call(9, "gone"))
    assert inbox.waiting == (1, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.send, call(0, "second"))
        await trio.testing.wait_all_tasks_blocked()
        assert [(await inbox.receive()).request[1] for _ in range(2)] == ["first", "second"]


async def test_an_asker_that_gives_up_is_removed_at_once(autojump_clock: MockClock) -> None:
    inbox, calls = new_inbox(1), WeakSet[AnyCall]()

    async def send(urgency: int, patience_s: int) -> None:
        calls.add(asked := call(urgency, patience_s))
        with trio.move_on_after(patience_s):
            await inbox.send(asked)

    await inbox.send(call(0, "first"))
    async with trio.open_nursery() as nursery:
        for urgency, patience_s in [(0, 8), (3, 1), (0, 1), (-3, 1), (0, 9)]:
            nursery.start_soon(send, urgency, patience_s)
            await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(2)
        gc.collect()
        assert sorted(each.request for each in calls) == [(0, 8), (0, 9)]
        assert inbox.waiting == (1, 2)
        assert [(await inbox.receive()).request[1] for _ in range(3)] == ["first", 8, 9]
    assert inbox.waiting == (0, 0)


async def test_a_call_whose_asker_leaves_is_taken_out_wherever_it_stands(nursery: trio.Nursery) -> None:
    inbox, refused = new_inbox(2), 0

    def fits(_: Any) -> bool:
        nonlocal refused
        refused += 1
        return False

    first, second = call(0, "first"), call(0, "second")
    nursery.start_soon(inbox.receive, fits)
    await inbox.send(first)
    await inbox.send(second)
    nursery.start_soon(inbox.send, call(0, "third"))
    await trio.testing.wait_all_tasks_blocked()
    assert inbox.waiting == (2, 1)
    second.leave()
    assert inbox.waiting == (2, 0), "its room is the third one's"
    before = refused
    first.leave()
    await trio.testing.wait_all_tasks_blocked()
    assert (inbox.waiting, refused) == ((1, 0), before + 1), "the next one is looked at"
    assert (await inbox.receive()).request[1] == "third"
    second.leave()
    assert inbox.waiting == (0, 0)


async def test_the_most_urgent_goes_first_even_from_outside(nursery: trio.Nursery) -> None:
    inbox, done = new_inbox(2), []

    async def send(urgency: int, name: str) -> None:
        await inbox.send(call(urgency, name))
        done.append(name)

    for urgency, name in [(0, "a"), (1, "b"), (1, "c"), (9, "d"), (-1, "e")]:
        nursery.start_soon(send, urgency, name)
        await trio.testing.wait_all_tasks_blocked()
    assert (done, inbox.waiting) == (["a", "b"], (2, 3))
    assert (await inbox.receive()).request[1] == "d"
    await trio.testing.wait_all_tasks_blocked()
    assert (done, inbox.waiting) == (["a", "b", "d"], (2, 2)), "whoever is received waits no more"
    assert [(await inbox.receive()).request[1] for _ in range(4)] == ["b", "c", "a", "e"]


async def test_a_call_whose_asker_leaves_as_it_is_received_is_dropped_once(autojump_clock: MockClock) -> None:
    inbox = new_inbox(1)
    await inbox.send(call(0, "first"))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.send, call(9, "high"))
            await trio.testing.wait_all_tasks_blocked()
            taken = await inbox.receive()
            scope.cancel()
    assert (taken.request[1], inbox.waiting) == ("high", (1, 0))
    assert (await inbox.receive()).request[1] == "first"


async def test_a_receiver_that_is_cancelled_takes_nothing_along(autojump_clock: MockClock) -> None:
    inbox, got = new_inbox(), []

    async def receive() -> None:
        got.append((await inbox.receive()).request[1])

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(1):
            await inbox.receive()
        nursery.start_soon(receive)
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        await inbox.send(call(0, "a"))
        await inbox.send(call(0, "b"))
    assert sorted(got) == ["a", "b"]


async def test_a_cancelled_asker_puts_nothing_in() -> None:
    inbox = new_inbox()
    with trio.CancelScope() as scope:
        scope.cancel()
        await inbox.send(call(0))
    assert inbox.waiting == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 7])
@given(urgencies=st.lists(st.integers(-3, 3), max_size=12))
def test_any_calls_come_out_in_order_once_each(size: int, urgencies: list[Any]) -> None:
    async def main() -> None:
        inbox = new_inbox(size)
        async with trio.open_nursery() as nursery:
            for number, urgency in enumerate(urgencies):
                nursery.start_soon(inbox.send, call(urgency, number))
                await trio.testing.wait_all_tasks_blocked()
            out = [(await inbox.receive()).request[1] for _ in urgencies]
        assert out == sorted(range(len(urgencies)), key=lambda number: (-urgencies[number], number))

    trio.run(main)
