"""Owners take turns in a fair queue, which equals a simple model after every operation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.kit.calls import BugCounter, Call
from actors.kit.fair_queue import Entry, FairQueue
from protocol.messages.generation import Finished, Generate, Sampling, Started, Tokens
from protocol.token_ids import TokenIds
from supervisor.engines.work import request_inbox
from tests.rig.calls import AnyAnswer, AnyCall, AnyPriorityInbox


class Model:
    """The same line as one list, looked through from the beginning each time."""

    def __init__(self) -> None:
        self.waiting, self.now = list[Entry[Any]](), 0
        self.accounts, self.turns = Counter[str](), dict[str, int]()

    def add(self, entry: Entry[Any]) -> None:
        self.now += 1
        if all(each.owner != entry.owner for each in self.waiting):
            self.turns[entry.owner] = self.now
        self.waiting.append(entry)

    def charge(self, owner: str, amount: int) -> None:
        self.now += 1
        self.accounts[owner] += amount
        if amount > 0:
            self.turns[owner] = self.now

    def first(self) -> Entry[Any] | None:
        def place(entry: Entry[Any]) -> tuple[Any, int, Any, Any]:
            return -entry.priority, self.accounts[entry.owner], self.turns[entry.owner], entry.number

        return min(self.waiting, key=place, default=None)


OWNERS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), OWNERS, st.integers(-1, 1)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("charge"), OWNERS, st.integers(-3, 3)),
    ),
    max_size=60,
)


@given(STEPS)
def test_the_queue_equals_a_simple_model_after_every_operation(steps: list[tuple[Any, ...]]) -> None:
    line, model = FairQueue[object](), Model()
    for what, *arguments in steps:
        if what == "add":
            model.add(line.add(object(), arguments[0], arguments[1]))
        elif what == "remove" and model.waiting:
            line.remove(model.waiting.pop(arguments[0] % len(model.waiting)))
        elif what == "take" and model.waiting:
            entry = line.first()
            assert entry is not None
            line.remove(entry)
            line.charge(entry.owner, arguments[0])
            model.waiting.remove(entry)
            model.charge(entry.owner, arguments[0])
        elif what == "charge":
            line.charge(*arguments)
            model.charge(*arguments)
        assert line.first() is model.first()
        assert sorted(map(id, line)) == sorted(id(each.item) for each in model.waiting)
        heads = {(each.owner, each.priority): each for each in reversed(model.waiting)}
        assert {(each.owner, each.priority): each for each in line.heads()} == heads
        assert all(line.account(owner) == model.accounts[owner] for owner in "abc")
        assert all(line.waiting(owner) == sum(each.owner == owner for each in model.waiting) for owner in "abc")
        assert line.owners == len({each.owner for each in model.waiting} | {o for o in "abc" if model.accounts[o]})
    for entry in model.waiting:
        line.remove(entry)
    assert (len(line), line.first(), line.owners) == (0, None, len(line.accounts()))
    line.charge("d", 10**6)
    line.add(object(), "d", 0)
    line.catch_up("e")
    assert line.account("e") == 10**6, "nothing of the others is left"


@given(st.lists(st.tuples(OWNERS, st.integers(-1, 1)), min_size=1, max_size=30))
def test_a_full_line_finds_the_last_of_the_owner_with_most_at_the_lowest_priority(added: list[Any]) -> None:
    line = FairQueue[None]()
    entries = [line.add(None, owner, priority) for owner, priority in added]
    lowest = [entry for entry in entries if entry.priority == min(entry.priority for entry in entries)]
    most = Counter(entry.owner for entry in lowest)
    found = line.last_of_largest()
    assert found is not None
    assert most[found.owner] == max(most.values())
    assert found is [entry for entry in lowest if entry.owner == found.owner][-1]


def test_owners_take_turns_though_each_account_is_empty_again_before_the_next_turn() -> None:
    line, taken = FairQueue[None](), list[str]()
    for owner in "aaabbb":
        line.add(None, owner, 0)
    while (entry := line.first()) is not None:
        line.remove(entry)
        line.charge(entry.owner, 1)
        line.charge(entry.owner, -1)
        taken.append(entry.owner)
    assert taken == list("ababab")


def call(owner: str, weight: int = 1, name: str | None = None) -> AnyCall:
    return AnyCall((owner, weight, name), AnyAnswer(0))


def new_inbox(size: int = 1000) -> AnyPriorityInbox:
    return AnyPriorityInbox(size, lambda _: 0, lambda request: request[0], lambda request: request[1])


async def taken(inbox: AnyPriorityInbox, times: int) -> list[Any]:
    return [(await inbox.receive()).request[0] for _ in range(times)]


async def test_an_owner_that_was_away_has_no_advantage() -> None:
    inbox = new_inbox()
    for _ in range(50):
        await inbox.send(call("a"))
    assert await taken(inbox, 20) == ["a"] * 20
    for _ in range(30):
        await inbox.send(call("b"))
    assert Counter(await taken(inbox, 20)) == {"a": 10, "b": 10}


async def test_a_call_whose_asker_has_left_takes_no_turn() -> None:
    inbox = new_inbox()
    left, stays = call("a"), call("b")
    await inbox.send(left)
    await inbox.send(stays)
    left.leave()
    assert await inbox.receive() is stays
    assert inbox.waiting == (0, 0)
    with trio.move_on_after(0):
        await inbox.receive()
        pytest.fail("nobody waits")


@given(st.lists(st.tuples(OWNERS, st.integers(1, 9)), min_size=1, max_size=60))
def test_while_two_wait_neither_has_had_more_than_the_other_by_more_than_one_turn(sent: list[Any]) -> None:
    async def main() -> None:
        inbox = new_inbox()
        for owner, weight in sent:
            await inbox.send(call(owner, weight))
        left, had = Counter(owner for owner, _ in sent), Counter[str]()
        for _ in sent:
            owner, weight, _ = (await inbox.receive()).request
            left[owner] -= 1
            had[owner] += weight
            waiting = [each for each in left if left[each]]
            assert all(had[one] - had[other] <= 9 for one in waiting for other in waiting)

    trio.run(main)


async def test_a_key_with_128_choices_does_not_make_another_wait_for_all_of_them(autojump_clock: MockClock) -> None:
    address, inbox = request_inbox(64)
    slots, ended = trio.Semaphore(16), dict[str, float]()

    async def serve(nursery: trio.Nursery) -> None:
        while True:
            await slots.acquire()
            nursery.start_soon(answer, await inbox.receive())

    async def answer(asked: Call[Generate, Started | Tokens, Finished]) -> None:
        with asked.answering(BugCounter()) as replies:
            await trio.sleep(asked.request.sampling.tokens_max / 100)
            replies.end(None)
        slots.release()

    async def ask(owner: str, tokens: int) -> None:
        generate = Generate(f"{len(ended):032x}", TokenIds.of([1]), Sampling(tokens), owner=owner)
        async with address.ask(generate, 0) as answered:
            await answered.result()
        ended[owner] = trio.current_time()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, nursery)
        async with trio.open_nursery() as askers:
            for _ in range(128):
                askers.start_soon(ask, "alice", 800)
            await trio.testing.wait_all_tasks_blocked()
            askers.start_soon(ask, "bob", 10)
        nursery.cancel_scope.cancel()
    assert ended == {"alice": 64.1, "bob": 8.1}, "one turn of 8 s, and its own tenth of a second"
