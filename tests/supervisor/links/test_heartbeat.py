"""Heartbeats: what keeps a link that has nothing to send, and when silence ends one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.errors import LinkLost, LocalViolation, PeerLost
from protocol.link.frames import KeepAlive
from protocol.link.peer import Peer
from protocol.messages.operations import FlushCache
from supervisor.links.heartbeat import EARLY_S, TURN_LINKS_MAX, Heartbeat, HeartbeatTask
from supervisor.links.link import Link
from tests.rig.links import hand_written, linked, never_answer
from tests.rig.log_records import log_records
from tests.rig.network import sim_pair

HEARTBEAT = Heartbeat(heartbeat_s=1.0, silent_s=3.0)


async def test_a_heartbeat_is_sent_for_every_second_in_which_nothing_else_was(autojump_clock: MockClock) -> None:
    sent: list[tuple[float, str]] = []
    async with hand_written(heartbeat=HEARTBEAT) as other, trio.open_nursery() as nursery:

        async def keep_alive() -> None:
            for _ in range(8):
                await trio.sleep(0.9)
                await other.send(KeepAlive())

        async def record() -> None:
            while True:
                frames = await other.receive()
                sent.extend((round(trio.current_time(), 2), type(frame).__name__) for frame in frames)

        nursery.start_soon(keep_alive)
        nursery.start_soon(record)
        await trio.sleep(2.5)
        for _ in range(4):
            other.link.open(FlushCache(), 1)
            await trio.sleep(0.5)
        await trio.sleep(1.2)
        nursery.cancel_scope.cancel()
    requests = [(at, "Open") for at in (2.5, 3.0, 3.5, 4.0)]
    assert sent == [(1.0, "KeepAlive"), (2.0, "KeepAlive"), *requests, (5.0, "KeepAlive")]


async def test_a_bug_in_the_heartbeat_of_one_link_ends_no_other(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy:
        """A link whose heartbeat fails."""

        reason: LocalViolation | None = None

        def beat(self, due_at: float, now: float) -> float | None:
            raise ZeroDivisionError

        def abort(self, reason: LocalViolation) -> None:
            self.reason = reason

    heartbeats, buggy = HeartbeatTask(), Buggy()
    heartbeats.add(buggy, 0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heartbeats.run)
        async with hand_written(heartbeat=HEARTBEAT, heartbeat_task=heartbeats) as other:
            assert await other.receive() == [KeepAlive()]
            assert not other.link.lost
        nursery.cancel_scope.cancel()
    assert isinstance(buggy.reason, LocalViolation)
    assert [record.message for record in log_records(caplog) if record.exc_info] == ["a bug ended a link"]


async def test_thousands_of_links_are_served_a_few_in_each_turn(autojump_clock: MockClock) -> None:
    class Steps(trio.abc.Instrument):
        """Counts the steps of all tasks."""

        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    class Idle:
        """A link that sends a heartbeat each second."""

        def beat(self, due_at: float, now: float) -> float | None:
            served[steps.count].append(now)
            return due_at + 1

        def abort(self, reason: LocalViolation) -> None:
            raise reason

    heartbeats, steps = HeartbeatTask(), Steps()
    served: dict[int, list[float]] = defaultdict(list)
    for _ in range(10 * TURN_LINKS_MAX):
        heartbeats.add(Idle(), 1.0)
    trio.lowlevel.add_instrument(steps)
    with trio.move_on_after(2.5):
        await heartbeats.run()
    trio.lowlevel.remove_instrument(steps)
    assert [len(times) for times in served.values()] == [TURN_LINKS_MAX] * 20
    assert all(2 - EARLY_S - 0.01 <= at <= 2.01 for at in list(served.values())[-1])


# Silence ----------------------------------------------------------------------------------


async def test_an_end_that_stops_is_lost_after_its_silence_and_not_before(autojump_clock: MockClock) -> None:
    async with hand_written(heartbeat=HEARTBEAT) as other:
        _, answer = other.link.open(FlushCache(), 1)
        for _ in range(4):
            await trio.sleep(2.9)
            await other.send(KeepAlive())
        await trio.sleep(2.99)
        assert not other.link.lost
        with pytest.raises(LinkLost):
            await answer.result()
        assert trio.current_time() == pytest.approx(4 * 2.9 + 3.0)
        await wait_all_tasks_blocked()
        assert isinstance(other.ended, PeerLost)
        assert str(other.ended) == "the other end has been silent for 3 s"
        assert other.link.received_bye is None


@pytest.mark.parametrize("acknowledges", [True, False])
async def test_an_end_that_never_sends_hello_is_lost_at_silent_s(acknowledges: bool, autojump_clock: MockClock) -> None:
    near, _far = sim_pair()
    acknowledged_s = near.acknowledged_s if acknowledges else lambda: None
    with pytest.raises(PeerLost, match="silent for 3 s"):
        await Link(near, Peer("here", serves_max=0), heartbeat=HEARTBEAT, acknowledged_s=acknowledged_s).run()
    assert trio.current_time() == 3


async def test_two_idle_ends_keep_their_link_until_the_connection_is_half_open(autojump_clock: MockClock) -> None:
    async with linked(never_answer, heartbeat=HEARTBEAT) as ends:
        await trio.sleep(1000.5)
        assert ends.ended == {}
        assert all(990 <= link.traffic.messages_sent <= 1010 for link in (ends.asker, ends.server))
        ends.near.swallow()  # neither end is notified
        await trio.sleep(3)
        at: Any = pytest.approx(1003)
        silent = ("the other end has been silent for 3 s", at)
        assert ends.ended == {"asker": silent, "server": silent}
