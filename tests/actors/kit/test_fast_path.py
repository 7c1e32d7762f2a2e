"""The fast path of an answer: tokens skip stages, and nobody but a clock can tell."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
import trio
from attrs import define, field
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.calls import CreditExceeded
from actors.kit.fast_path import FastPath, put_token
from protocol.errors import LinkLost
from protocol.messages.generation import Tokens, one_token
from protocol.messages.text import Text
from tests.rig.calls import AnyAnswer
from tests.rig.tasks import expect_error

TEXTS = {token: Text(f"{token},", 1) if token != 13 else None for token in range(1000)}


@define(eq=False)
class Chain:
    """A source, whose relay puts into the answer of the last asker, whose relay appends to `texts`."""

    source: AnyAnswer = field(factory=lambda: AnyAnswer(1000))
    last: AnyAnswer = field(factory=lambda: AnyAnswer(1000))
    texts: list[str] = field(factory=list)
    stage: list[object] = field(factory=list)  # what the stage between them has recorded
    bug: Exception | None = None  # of that stage
    broken: Exception | None = None  # of the last asker's receiver
    path: FastPath[Text] = field(init=False)
    until: float = inf
    evaluated: list[tuple[float, list[object]]] = field(factory=list)  # deadlines, by their times

    def __attrs_post_init__(self) -> None:
        self.path = FastPath(self.receive)

    def receive(self, text: Text, _: float) -> None:
        if self.broken is not None:
            raise self.broken
        self.texts.append(text.text)

    def pass_on(self, reply: Tokens) -> None:
        self.stage += reply.ids
        self.last.put(Text("".join(f"{token}," for token in reply.ids), len(reply.ids)), len(reply.ids))
        self.last.extend_fast_path(self.source, self.record)

    def record(self, ids: Sequence[int], last_at: float) -> None:
        if self.bug is not None:
            raise self.bug
        self.stage += [*ids, f"at {last_at:g}"]

    def deadline(self) -> float:
        self.evaluated.append((trio.current_time(), list(self.stage)))
        return self.until

    async def relay_source(self) -> None:
        await self.source.relay(self.pass_on, self.deadline)

    async def relay_last(self) -> None:
        await self.last.relay(lambda text: self.receive(text, 0.0), None, self.path)

    async def start(self, nursery: trio.Nursery, *, opened: bool = True) -> None:
        nursery.start_soon(self.relay_source)
        nursery.start_soon(self.relay_last)
        await wait_all_tasks_blocked()
        self.put(1)
        if opened:
            self.path.open(TEXTS)

    def put(self, *tokens: int) -> None:
        for token in tokens:
            put_token(self.source, token, trio.current_time(), one_token)

    def end(self) -> None:
        self.source.end(None)
        self.last.end(None)


async def test_a_stage_records_the_tokens_that_skip_it_once_anything_else_happens(autojump_clock: MockClock) -> None:
    chain = Chain()
    async with trio.open_nursery() as nursery:
        await chain.start(nursery)
        chain.put(2, 3)
        assert chain.texts == ["1,", "2,", "3,"]
        assert chain.stage == [1]
        chain.put(13)
        assert chain.texts[-1] == "13,"
        assert chain.stage == [1, 2, 3, "at 0", 13]
        chain.put(4)
        assert chain.stage[-1] == 13, "the path is still open"
        chain.end()
    assert chain.stage == [1, 2, 3, "at 0", 13, 4, "at 0"]


async def test_no_token_skips_a_stage_while_the_path_is_not_open(autojump_clock: MockClock) -> None:
    chain = Chain()
    async with trio.open_nursery() as nursery:
        await chain.start(nursery, opened=False)
        chain.put(2)
        assert chain.stage == [1, 2]
        chain.path.open(TEXTS)
        chain.put(3)
        chain.path.close()
        chain.put(4)
        assert chain.stage == [1, 2, 3, "at 0", 4]
        chain.end()
    assert chain.texts == ["1,", "2,", "3,", "4,"]


async def test_every_answer_on_the_way_counts_credit(autojump_clock: MockClock) -> None:
    chain = Chain(AnyAnswer(4), AnyAnswer(1000))
    async with trio.open_nursery() as nursery:
        await chain.start(nursery)
        chain.put(2, 3, 4)
        with pytest.raises(CreditExceeded):
            chain.put(5)
        assert (chain.source.credit, chain.last.credit) == (0, 996)
        chain.end()


async def test_a_deadline_depends_on_the_last_token_that_came(autojump_clock: MockClock) -> None:
    chain = Chain(until=5)
    async with trio.open_nursery() as nursery:
        await chain.start(nursery)
        await trio.sleep(3)
        chain.put(2)
        chain.until = 8
        await trio.sleep(4)
        chain.end()
    assert [entry for entry in chain.evaluated if entry[0] == 5] == [(5, [1, 2, "at 3"])]


async def test_an_error_of_the_receiver_is_one_of_the_last_relay_alone(autojump_clock: MockClock) -> None:
    chain = Chain()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chain.relay_source)
        nursery.start_soon(expect_error, ZeroDivisionError, chain.relay_last)
        await wait_all_tasks_blocked()
        chain.put(1)
        chain.path.open(TEXTS)
        chain.broken = ZeroDivisionError()
        chain.put(2)
        assert chain.stage == [1, 2, "at 0"]
        chain.put(3)
        assert chain.stage == [1, 2, "at 0", 3], "its relay goes on, and what it puts is dropped"
        chain.source.end(None)


async def test_a_bug_in_what_a_stage_records_is_one_of_its_own_relay(autojump_clock: MockClock) -> None:
    chain = Chain(bug=ZeroDivisionError())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, ZeroDivisionError, chain.relay_source)
        nursery.start_soon(chain.relay_last)
        await wait_all_tasks_blocked()
        chain.put(1)
        chain.path.open(TEXTS)
        chain.put(2, 13, 3)
        assert chain.texts == ["1,", "2,"], "what comes later is dropped with the relay"
        chain.end()


async def test_an_answer_that_fails_is_cut_off_and_another_source_goes_on_behind_it(autojump_clock: MockClock) -> None:
    chain = Chain()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_error, LinkLost, chain.relay_source)
        nursery.start_soon(chain.relay_last)
        await wait_all_tasks_blocked()
        chain.put(1)
        chain.path.open(TEXTS)
        chain.put(2)
        lost, chain.source = chain.source, AnyAnswer(1000)
        lost.fail(LinkLost("gone"))
        assert chain.stage == [1, 2, "at 0"]
        assert lost.fast_path is None
        nursery.start_soon(chain.relay_source)
        await wait_all_tasks_blocked()
        chain.put(3, 4)
        assert chain.stage == [1, 2, "at 0", 3]
        chain.end()
    assert chain.stage == [1, 2, "at 0", 3, 4, "at 0"]
    assert chain.texts == ["1,", "2,", "3,", "4,"]


async def test_the_end_of_the_last_answer_cuts_off_the_whole_chain(autojump_clock: MockClock) -> None:
    chain = Chain()
    async with trio.open_nursery() as nursery:
        await chain.start(nursery)
        chain.put(2)
        chain.last.abandon()
        assert (chain.source.fast_path, chain.last.fast_path) == (None, None)
        assert chain.stage == [1, 2, "at 0"]
        chain.put(3)
        assert chain.stage[-1] == 3
        assert chain.texts == ["1,", "2,"]
        chain.source.end(None)
