"""Stalled links: a process that stands still is asked nothing, and what it has asked goes on while its kernel answers."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import trio
from attrs import Factory, define
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import LinkLost
from protocol.link.frames import KeepAlive
from protocol.messages.operations import FlushCache
from protocol.messages.text import Text
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import STALLED_DETAIL, Link
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.links import Service, hand_written, linked

HEARTBEAT = Heartbeat(heartbeat_s=1.0, silent_s=3.0, stalled_s=15.0)


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=0.01)


def count_up(released: list[float]) -> Service:
    """Return a service that replies twice a second until it is cancelled, and records when that is."""

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        try:
            for number in count(1):
                await trio.sleep(0.5)
                replies.put(Text(str(number), 1))
        finally:
            released.append(trio.current_time())

    return service


@define(eq=False)
class Asked:
    """The replies to a request over a link, and how it failed."""

    texts: list[str] = Factory(list)
    failed: tuple[str, float] | None = None

    async def ask(self, link: Link) -> None:
        try:
            async with link.ask(FlushCache(), 1000) as replies:
                async for reply in replies:
                    assert isinstance(reply, Text)
                    self.texts.append(reply.text)
        except LinkLost as error:
            self.failed = (error.detail, trio.current_time())


async def test_requests_to_a_process_that_stands_still_fail_at_silent_s_and_its_own_go_on(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    released: list[float] = []
    async with linked(count_up(released), heartbeat=HEARTBEAT, acknowledges=True) as ends:
        sent, received, again = Asked(), Asked(), Asked()
        nursery.start_soon(sent.ask, ends.asker)
        nursery.start_soon(received.ask, ends.server)
        await trio.sleep(1.25)
        ends.far.mute(until=9.0)
        await trio.sleep_until(8.9)
        assert sent.failed == (STALLED_DETAIL, about(4.0))  # the last frame came at 1.0
        assert (ends.asker.stalled, ends.ended) == (True, {})
        with pytest.raises(LinkLost, match=STALLED_DETAIL):
            ends.asker.open(FlushCache(), 1)
        with pytest.raises(LinkLost, match=STALLED_DETAIL):
            async with ends.asker.ask(FlushCache(), 1):
                pass
        # This half of a stall lets the Cancel through.
        assert (released, ends.server.statistics().calls) == ([about(4.0)], 0)
        await trio.sleep_until(9.1)
        assert not ends.asker.stalled
        nursery.start_soon(again.ask, ends.asker)
        await trio.sleep(3)
        assert len(again.texts) > 3
        assert (received.texts, received.failed) == ([str(number) for number in range(1, 25)], None)
        assert len(released) == 1


async def test_a_process_that_stands_still_for_stalled_s_is_lost_with_all_that_it_has_asked(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    released: list[float] = []
    async with linked(count_up(released), heartbeat=HEARTBEAT, acknowledges=True) as ends:
        nursery.start_soon(Asked().ask, ends.server)
        await trio.sleep(1.25)
        ends.far.mute(until=100.0)
        await trio.sleep_until(15.9)
        assert released == []
        await trio.sleep_until(16.1)
        assert ends.ended["asker"] == ("the other end has stood still for 15 s", about(16.0))
        assert released == [about(16.0)]


@pytest.mark.parametrize("acknowledges", [True, False])
async def test_a_host_that_is_gone_is_lost_at_silent_s_whichever_end_has_asked(
    acknowledges: bool, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    released: list[float] = []
    async with linked(count_up(released), heartbeat=HEARTBEAT, acknowledges=acknowledges) as ends:
        requests = Asked(), Asked()
        for request, link in zip(requests, (ends.asker, ends.server), strict=True):
            nursery.start_soon(request.ask, link)
        await trio.sleep(1.25)
        ends.near.swallow()
        await trio.sleep_until(4.2)
        silent = ("the other end has been silent for 3 s", about(4.0))
        assert ends.ended == {"asker": silent, "server": silent}
        assert len(released) == 2
        assert None not in {request.failed for request in requests}


async def test_a_host_that_goes_while_its_process_stands_still_is_lost_a_heartbeat_or_two_later(
    autojump_clock: MockClock,
) -> None:
    async with linked(None, heartbeat=HEARTBEAT, acknowledges=True) as ends:
        await trio.sleep(1.25)
        ends.far.mute(until=100.0)
        await trio.sleep_until(6.5)
        assert ends.asker.stalled
        ends.near.swallow()
        await trio.sleep(2 * HEARTBEAT.heartbeat_s + 0.1)
        assert ends.ended["asker"][0] == "the other end has been silent for 7 s"


@pytest.mark.parametrize("before_s", [3.5, 14.5])
@pytest.mark.parametrize("stood_still_s", [3.2, 13.2, 50])
async def test_an_end_that_stood_still_itself_reads_first_whichever_limit_is_next(
    before_s: float, stood_still_s: float, mock_clock: MockClock
) -> None:
    async def pass_s(seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            mock_clock.jump(0.05)
            await wait_all_tasks_blocked()

    async with hand_written(heartbeat=HEARTBEAT, acknowledges=True) as other:
        await pass_s(before_s)
        assert other.link.stalled  # the other end stands still, and now this one does
        mock_clock.jump(stood_still_s)
        await wait_all_tasks_blocked()
        assert (other.link.lost, other.link.stalled) == (False, True)
        await other.send(KeepAlive())  # as if it had not been read
        await pass_s(2.5)
        assert (other.link.lost, other.link.stalled) == (False, False)
        await pass_s(1.0)
        assert (other.link.lost, other.link.stalled) == (False, True)
        await pass_s(12.5)
        assert other.link.lost
