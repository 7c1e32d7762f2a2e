"""Requests that the other end of a link has asked: their credit, their deadlines, and the release of their streams."""

from __future__ import annotations

from math import inf

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import NotReady
from protocol.link import codec
from protocol.link.frames import Credit, Fail, Open
from protocol.link.peer import Peer
from protocol.messages.engine import Done
from protocol.messages.operations import FlushCache
from supervisor.links.link import Link
from tests.rig.calls import AnyAnswer, AnyCall, mailbox
from tests.rig.links import ask, count_to_three, hand_written, held_for, linked
from tests.rig.network import sim_pair

REQUEST = codec.encode(FlushCache())


async def test_a_service_that_never_releases_its_call_keeps_the_stream_for_ten_seconds(
    autojump_clock: MockClock,
) -> None:
    async with linked(held_for(100), streams=1) as ends:
        with trio.move_on_after(1):
            await ask(ends.asker)
        async with ends.asker.ask(FlushCache(), 9):
            assert trio.current_time() == 11


async def test_credit_that_comes_before_the_call_is_taken_counts(autojump_clock: MockClock) -> None:
    address, inbox = mailbox(0)
    async with hand_written(services={("", FlushCache): address}) as other:
        await other.send(Open(1, REQUEST, 1))
        await other.send(Credit(1, 5))
        call = await inbox.receive()
        await wait_all_tasks_blocked()
        assert call.answer.credit == 6
        await other.send(Credit(1, 2))
        assert call.answer.credit == 8


async def test_a_worker_that_is_not_there_is_not_ready_and_that_is_no_violation(autojump_clock: MockClock) -> None:
    async with linked(count_to_three) as ends:
        for _ in range(5):
            with pytest.raises(NotReady, match="there is no oak here"):
                async with ends.asker.ask(FlushCache(), 9, "oak") as replies:
                    await replies.result()
        assert (await ask(ends.asker))[1] == Done()
        ends.check_at_rest()


# The order of requests --------------------------------------------------------------------


async def test_services_are_asked_in_the_order_in_which_their_requests_arrived(autojump_clock: MockClock) -> None:
    asked: list[int] = []

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        asked.append(replies.credit)
        replies.end(Done())

    async with linked(service, streams=5, inbox_size=5) as ends:
        for burst in range(12):  # Trio runs the tasks that begin in one turn forwards or backwards
            for number in range(5):
                ends.asker.open(FlushCache(), 5 * burst + number)
            await trio.sleep(1)
    assert asked == [*range(60)]


# Deadlines --------------------------------------------------------------------------------


async def test_a_deadline_ends_a_call_at_the_far_end_though_no_cancel_arrives(autojump_clock: MockClock) -> None:
    released: list[float] = []
    async with linked(held_for(0, released)) as ends:
        with trio.move_on_after(2):
            async with ends.asker.ask(FlushCache(), 9) as replies:
                await anext(replies)
                ends.near.swallow()
                await trio.sleep(inf)
        await trio.sleep(5)
        assert released == [2]
        assert not ends.server.statistics().calls


@pytest.mark.parametrize(("within_ms", "fails_at"), [(0, 0), (-5, 0), (1500, 1.5)])
async def test_a_call_whose_time_is_up_fails_as_deadline_exceeded(
    within_ms: int, fails_at: float, autojump_clock: MockClock
) -> None:
    async with hand_written(services={("", FlushCache): mailbox(4)[0]}) as other:
        await other.send(Open(1, REQUEST, 1, "", within_ms))
        (fail,) = await other.receive()
        assert isinstance(fail, Fail)
        assert (fail.code, trio.current_time()) == ("deadline_exceeded", fails_at)


async def test_a_deadline_crosses_two_links_as_the_time_that_is_left(autojump_clock: MockClock) -> None:
    released: list[float] = []
    async with linked(held_for(0, released)) as second:
        near, far = sim_pair()
        first = Link(near, Peer("a", serves_max=0))
        middle = Link(far, Peer("b", serves_max=4), {("worker", FlushCache): second.asker})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run)
            nursery.start_soon(middle.run)
            await first.wait_ready()
            with trio.move_on_after(7.5):
                async with first.ask(FlushCache(), 1, "worker") as replies:
                    await anext(replies)
                    near.swallow()  # no Cancel arrives over either link
                    second.near.swallow()
                    await replies.result()
            assert released == []
            await trio.sleep(0.01)
            assert released == [pytest.approx(7.5)]
            assert not second.server.statistics().calls
            nursery.cancel_scope.cancel()
