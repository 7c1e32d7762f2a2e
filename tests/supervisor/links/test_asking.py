"""Requests over a link: they wait for a free stream, are cancelled at any moment, and fail each for itself."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import Overloaded, TooLarge
from protocol.link.frames import Cancel, Fail, Open
from protocol.messages.engine import Done
from protocol.messages.generation import Generate, Tokens
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.links.encoding import BODY_BYTES_MAX
from supervisor.links.link import Link
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.fake_engine import generate
from tests.rig.links import ask, count_to_three, hand_written, held_for, linked, never_answer
from tests.system.simulator import simulate


def fits_no_frame() -> Generate:
    return evolve(generate(), tokens=TokenIds(bytes(BODY_BYTES_MAX)))


async def test_one_stream_serves_many_requests_one_after_another(autojump_clock: MockClock) -> None:
    async with linked(count_to_three, streams=1) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask, ends.asker)
        assert trio.current_time() == 12
        ends.check_at_rest()


async def test_a_request_that_may_not_wait_is_refused_where_no_stream_is_free(autojump_clock: MockClock) -> None:
    async with linked(never_answer, streams=2) as ends:
        for _ in range(2):
            ends.asker.open(FlushCache(), 1)
        with pytest.raises(Overloaded, match="2 streams are open"):
            ends.asker.open(FlushCache(), 1)


async def test_requests_of_one_turn_leave_in_the_order_in_which_they_were_asked(autojump_clock: MockClock) -> None:
    asked: list[int] = []
    async with hand_written() as other:

        async def ask_for(credit: int) -> None:
            asked.append(credit)
            async with other.link.ask(FlushCache(), credit):
                await trio.sleep_forever()

        for burst in range(12):  # Trio runs the tasks that begin in one turn forwards or backwards
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(ask_for, 5 * burst + number)
                opened = await other.receive()
                nursery.cancel_scope.cancel()
            assert [frame.credit for frame in opened if isinstance(frame, Open)] == asked[-5:]
            for frame in await other.receive():
                assert isinstance(frame, Cancel)
                await other.send(Fail(frame.stream, "asker_left", ""))


# Leaving ----------------------------------------------------------------------------------


async def test_a_stream_is_free_only_when_the_other_end_has_released_it(autojump_clock: MockClock) -> None:
    released: list[float] = []
    async with linked(held_for(3, released), streams=1) as ends:
        with trio.move_on_after(1):
            await ask(ends.asker)
        assert trio.current_time() == 1
        async with ends.asker.ask(FlushCache(), 9) as replies:
            await anext(replies)
            assert trio.current_time() == 4
        assert released == [4]


@pytest.mark.parametrize("inbox_size", [0, 4], ids=["inbox full", "in the inbox"])
async def test_a_request_that_nobody_has_taken_frees_its_stream_at_once(
    inbox_size: int, autojump_clock: MockClock
) -> None:
    async with linked(None, streams=1, inbox_size=inbox_size) as ends:
        with trio.move_on_after(1):
            await ask(ends.asker)
        await wait_all_tasks_blocked()
        ends.check_at_rest()
        assert trio.current_time() == 1


async def test_an_asker_that_leaves_while_it_waits_for_a_stream_takes_none(autojump_clock: MockClock) -> None:
    async with linked(count_to_three, streams=1) as ends:
        async with ends.asker.ask(FlushCache(), 9):
            with trio.move_on_after(1):
                await ask(ends.asker)
        await trio.sleep(1)
        ends.check_at_rest()
        assert ends.asker.peer.asked.last == 1


async def test_a_stream_that_the_next_asker_cannot_use_goes_to_the_one_behind_it(autojump_clock: MockClock) -> None:
    failed: list[float] = []
    async with linked(count_to_three, streams=1) as ends:

        async def ask_too_much() -> None:
            with pytest.raises(TooLarge):
                async with ends.asker.ask(fits_no_frame(), 1):
                    pass
            failed.append(trio.current_time())

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for asks in (partial(ask, ends.asker), ask_too_much, ask_too_much, partial(ask, ends.asker)):
                    nursery.start_soon(asks)
                    await wait_all_tasks_blocked()
        assert (failed, trio.current_time()) == ([3, 3], 6)
        ends.check_at_rest()


async def test_who_waits_for_a_stream_is_not_overtaken_by_who_asks_later(autojump_clock: MockClock) -> None:
    asked, opened = list[int](), list[int]()

    async def ask_again_and_again(link: Link) -> None:
        for _ in range(20):
            number = len(asked)
            asked.append(number)
            async with link.ask(FlushCache(), 1) as replies:
                opened.append(number)
                await replies.result()

    async def end(call: AnyCall, replies: AnyAnswer) -> None:
        replies.end(Done())

    async with linked(end, streams=2) as ends:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask_again_and_again, ends.asker)
        assert opened == asked
        ends.check_at_rest()


async def test_an_asker_has_its_answer_in_the_turn_in_which_its_request_leaves(autojump_clock: MockClock) -> None:
    async with hand_written() as other:

        async def ask_once() -> None:
            async with other.link.ask(FlushCache(), 1):
                entered.append(True)
                await trio.sleep_forever()

        for number in range(12):  # who runs first in a turn is chance
            entered = list[bool]()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_once)
                while other.link.statistics().streams_asked == 0:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert entered
            await other.send(Fail(number + 1, "asker_left", ""))


async def test_leaving_after_the_end_sends_nothing(autojump_clock: MockClock) -> None:
    async with linked(count_to_three) as ends:
        async with ends.asker.ask(FlushCache(), 9) as replies:
            await trio.sleep(5)
        assert replies.over.is_set()
        ends.asker.cancel(1)
        assert ends.asker.statistics().queued_bytes == 0


@pytest.mark.parametrize("seed", range(5))
def test_replies_that_cross_a_cancel_are_dropped(seed: int) -> None:
    async def reply_often(call: AnyCall, replies: AnyAnswer) -> None:
        for number in range(100):
            replies.put(Tokens((number,)))
            await trio.sleep(0.001)

    async def scenario(rng: random.Random) -> None:
        async with linked(reply_often, rng=rng) as ends:
            for _ in range(5):
                async with ends.asker.ask(FlushCache(), 100) as replies:
                    await anext(replies)
            await trio.sleep(20)
            ends.check_at_rest()
            assert ends.ended == {}

    simulate(scenario, seed)


async def test_a_request_of_a_task_that_is_cancelled_has_no_time_left(autojump_clock: MockClock) -> None:
    async with hand_written() as other:
        with trio.CancelScope() as scope:  # noqa: ASYNC100  # no time passes here: it is cancelled
            scope.cancel()
            other.link.open(FlushCache(), 1)
        (request,) = await other.receive()
        assert isinstance(request, Open)
        assert request.within_ms == 0


async def test_a_deadline_that_the_first_reply_may_move_stays_here(autojump_clock: MockClock) -> None:
    async with hand_written() as other:
        with trio.move_on_after(5) as scope:
            other.link.open(FlushCache(), 1)
            other.link.open(generate(), 1)
            scope.deadline += 100  # as a gateway does with the first token
            opened = [frame for frame in await other.receive() if isinstance(frame, Open)]
        assert [request.within_ms for request in opened] == [5000, None]


# Errors -----------------------------------------------------------------------------------
