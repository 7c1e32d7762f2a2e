"""A link does not die because a process stood still: what its node asks of others goes on as long as its kernel answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from attrs import Factory, define, evolve
from trio.testing import MemoryReceiveStream, MemorySendStream, MockClock, memory_stream_pair, wait_all_tasks_blocked

from actors.kit.calls import BugCounter, mailbox
from actors.kit.priority_inbox import priority_inbox
from protocol import codec
from protocol.cluster import Leg, NodeState, Offer
from protocol.errors import ActorLost, LinkLost, PeerLost
from protocol.frames import VERSION, Hello, KeepAlive, encode
from protocol.greeting import Incarnation
from protocol.kind import Kind
from protocol.messages import FlushCache
from protocol.peer import Peer
from protocol.text_messages import Text
from supervisor.cluster import readiness
from supervisor.cluster.workers import LocalWorker
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import STALLED_DETAIL, Link
from supervisor.supervision.registration import Registration
from tests.rig.gateway import INFO
from tests.rig.network import SimTransport
from tests.rig.nodes import Node
from tests.supervisor.cluster.test_directory import waiting
from tests.supervisor.links.test_link import answering
from tests.system.simulator import sim_pair

HEART = Heartbeat(heartbeat_s=1.0, silent_s=3.0, stalled_s=15.0)
OFFER = Offer("b-0", "oak", Leg.BOTH, 4, up=True, engine=INFO)


@pytest.fixture(autouse=True)
def any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let anything answer a FlushCache."""
    monkeypatch.setitem(codec.ROWS, FlushCache, Kind(9, FlushCache, (object,), object))


@define(eq=False)
class Ends:
    """Both ends of a link that ask each other, what ended each, and which requests each answers or has let go."""

    links: dict[str, Link]
    near: SimTransport
    ended: dict[str, tuple[str, float]] = Factory(dict)
    answering: list[str] = Factory(list)
    freed: list[tuple[str, float]] = Factory(list)

    async def carry(self, name) -> None:
        try:
            await self.links[name].run()
        except PeerLost as error:
            self.ended[name] = (str(error), trio.current_time())

    async def hears_nothing(self, until: float) -> None:
        """Let one end's process stand still: for its peer nothing comes, but its kernel acknowledges."""
        self.near._into.stall(until)


@asynccontextmanager
async def both(knows: bool = True) -> AsyncIterator[Ends]:
    """Two ends, each of which asks the other for an answer that never ends by itself."""
    near, far = sim_pair()
    boxes = {name: mailbox(4) for name in ("here", "there")}
    links = {}
    for name, transport in (("here", near), ("there", far)):
        serves = {("", FlushCache): boxes[name][0]}
        asked = transport.acknowledged_s if knows else lambda: None
        links[name] = Link(transport, Peer(name, serves_max=4), serves, heartbeat=HEART, acknowledged_s=asked)
    ends = Ends(links, near)

    def serve(name: str):
        async def forever(call, replies) -> None:
            ends.answering.append(name)
            try:
                number = 0
                while True:
                    await trio.sleep(0.5)
                    replies.put(Text(str(number := number + 1), 1))
            finally:
                ends.freed.append((name, trio.current_time()))

        return forever

    async with trio.open_nursery() as nursery:
        for name in links:
            nursery.start_soon(ends.carry, name)
            nursery.start_soon(answering, boxes[name][1], serve(name), BugCounter())
        for link in links.values():
            await link.wait_ready()
        yield ends
        nursery.cancel_scope.cancel()


@define(eq=False)
class Asked:
    """What came of a request over a link."""

    texts: list[str] = Factory(list)
    failed: tuple[str, float] | None = None

    async def ask(self, link: Link) -> None:
        try:
            async with link.ask(FlushCache(), 1000) as replies:
                async for reply in replies:
                    self.texts.append(reply.text)  # type: ignore[attr-defined]
        except LinkLost as error:
            self.failed = (error.detail, trio.current_time())


async def test_d8_what_is_asked_of_a_process_that_stands_still_fails_at_silent_s_and_what_it_asks_goes_on(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with both() as ends:
        asks, is_asked = Asked(), Asked()
        nursery.start_soon(asks.ask, ends.links["here"])
        nursery.start_soon(is_asked.ask, ends.links["there"])
        await trio.sleep(1.25)
        await ends.hears_nothing(until=9.0)
        await trio.sleep_until(8.9)
        here = ends.links["here"]
        assert asks.failed == (STALLED_DETAIL, pytest.approx(4.0, abs=0.01))  # heard last at 1.0
        assert (here.lost, here.stalled, ends.ended) == (False, True, {})
        with pytest.raises(LinkLost, match=STALLED_DETAIL):
            here.open(FlushCache(), 1)
        with pytest.raises(LinkLost, match=STALLED_DETAIL):
            async with here.ask(FlushCache(), 1):
                pass
        assert ends.freed == [("there", pytest.approx(4.0, abs=0.01))]  # it hears the Cancel in this half of a stall
        await trio.sleep_until(9.1)
        assert not here.stalled
        again = Asked()
        nursery.start_soon(again.ask, here)
        await trio.sleep(3)
        assert len(again.texts) > 3
        assert [int(text) for text in is_asked.texts] == list(range(1, len(is_asked.texts) + 1))
        assert (len(is_asked.texts), is_asked.failed) == (24, None)
        assert ends.freed == [("there", pytest.approx(4.0, abs=0.01))]


async def test_d8_a_process_that_stands_still_for_stalled_s_is_lost_with_all_that_it_has_asked_for(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with both() as ends:
        nursery.start_soon(Asked().ask, ends.links["there"])
        await trio.sleep(1.25)
        await ends.hears_nothing(until=100.0)
        await trio.sleep_until(15.9)
        assert ends.freed == []
        await trio.sleep_until(16.1)
        assert ends.ended["here"] == ("the other end has stood still for 15 s", pytest.approx(16.0, abs=0.01))
        assert ends.freed == [("here", pytest.approx(16.0, abs=0.01))]


@pytest.mark.parametrize("knows", [True, False])
async def test_d8_a_host_that_is_gone_is_lost_at_silent_s_whichever_end_has_asked(
    knows: bool, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with both(knows=knows) as ends:
        asks, is_asked = Asked(), Asked()
        nursery.start_soon(asks.ask, ends.links["here"])
        nursery.start_soon(is_asked.ask, ends.links["there"])
        await trio.sleep(1.25)
        ends.near.swallow()
        await trio.sleep_until(4.2)
        silent = ("the other end has been silent for 3 s", pytest.approx(4.0, abs=0.01))
        assert ends.ended == {"here": silent, "there": silent}
        assert sorted(name for name, _ in ends.freed) == ["here", "there"]
        assert asks.failed is not None
        assert is_asked.failed is not None


async def test_d8_a_host_that_goes_while_its_process_stands_still_is_lost_a_beat_or_two_later(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with both() as ends:
        await trio.sleep(1.25)
        await ends.hears_nothing(until=100.0)
        await trio.sleep_until(6.5)
        assert ends.links["here"].stalled
        ends.near.swallow()
        await trio.sleep(2 * HEART.heartbeat_s + 0.1)
        assert ends.ended["here"][0] == "the other end has been silent for 7 s"


async def test_d8_an_end_that_never_said_hello_is_lost_at_silent_s(autojump_clock: MockClock) -> None:
    near, _far = sim_pair()
    with pytest.raises(PeerLost, match="silent for 3 s"):
        await Link(near, Peer("here", serves_max=0), heartbeat=HEART, acknowledged_s=near.acknowledged_s).run()


@pytest.mark.parametrize("before_s", [3.5, 14.5])
@pytest.mark.parametrize("stood_still_s", [3.2, 13.2, 50])
async def test_d8_an_end_that_stood_still_itself_judges_nobody_by_that_whichever_bound_is_next(
    before_s: float, stood_still_s: float, nursery: trio.Nursery, mock_clock: MockClock
) -> None:
    near, far = sim_pair()
    link = Link(near, Peer("here", serves_max=0), heartbeat=HEART, acknowledged_s=near.acknowledged_s)

    async def carry() -> None:
        with suppress(PeerLost):
            await link.run()

    async def pass_s(seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            mock_clock.jump(0.05)
            await wait_all_tasks_blocked()

    nursery.start_soon(carry)
    await far.send_all(encode(Hello(VERSION, "there", 8)))
    await link.wait_ready()
    await pass_s(before_s)
    assert link.stalled  # the other end stands still, and now this one does
    mock_clock.jump(stood_still_s)
    await wait_all_tasks_blocked()
    assert (link.lost, link.stalled) == (False, True)
    await far.send_all(encode(KeepAlive()))  # lay unread
    await wait_all_tasks_blocked()
    await pass_s(2.5)
    assert (link.lost, link.stalled) == (False, False)
    await pass_s(1.0)
    assert (link.lost, link.stalled) == (False, True)
    await pass_s(12.5)
    assert link.lost


# What a node makes of it ------------------------------------------------------------------------


@define(eq=False)
class Wire:
    """A wire whose other kernel always acknowledges."""

    stream: trio.abc.Stream

    async def send_all(self, data) -> None:
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes | bytearray:
        return await self.stream.receive_some()

    def acknowledged_s(self) -> float:
        return 0.0


async def linked(node: Node, nursery: trio.Nursery) -> trio.StapledStream[MemorySendStream, MemoryReceiveStream]:
    """Link a node with one of the name b, and return the other end of their wire."""
    near, far = memory_stream_pair()

    async def carry() -> None:
        with suppress(PeerLost):
            await node.links.carried.carry("b", Wire(near), "b", Incarnation())

    nursery.start_soon(node.links.carried.heartbeat_task.run)
    nursery.start_soon(carry)
    await far.send_all(encode(Hello(VERSION, "b", 8)))
    await wait_all_tasks_blocked()
    return far


async def test_what_waits_for_an_engine_goes_to_a_node_that_is_heard_again(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    node = Node("a", section=evolve(Node("a").section, heartbeat_s=1.0, silent_s=3.0, stalled_s=15.0))
    directory, (address, inbox) = node.directory, priority_inbox(2, lambda request: request.priority)
    plug, offer = Registration(directory.notify), Offer("a-0", "oak", Leg.BOTH, 2, up=False)
    here = directory.local["a-0"] = LocalWorker("a", offer, address, plug, inbox, directory)
    far = await linked(node, nursery)
    link = directory.nodes["b"].link
    link.on_announcement(NodeState((OFFER,)))
    with trio.fail_after(5):
        while not link.stalled:
            await directory.wait_changed()
    async with waiting(here, 2) as heard:
        assert heard == []
        await far.send_all(encode(KeepAlive()))
        await wait_all_tasks_blocked()
        assert heard == [ActorLost] * 2


async def test_d8_nobody_chooses_a_node_that_stands_still_and_readiness_and_metrics_say_why(
    nursery: trio.Nursery, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node("a", section=evolve(Node("a").section, heartbeat_s=1.0, silent_s=3.0, stalled_s=15.0))
    del node.directory.local["a-0"]
    far = await linked(node, nursery)
    link = node.directory.nodes["b"].link
    link.on_announcement(NodeState((OFFER,)))
    assert [each.load.name for each in node.directory.workers("oak")] == ["b/b-0"]
    pool = node.directory.pool("oak")
    with trio.fail_after(3.5):
        await pool.wait_changed()
    assert link.stalled
    assert node.directory.workers("oak") == []
    assert len(pool.ranked(Leg.BOTH)) == 0
    assert readiness.unready(node.directory, ["oak"]) == "engine b-0 is on a node that stands still"
    assert readiness.engines_up(node.directory) == {"b/b-0": 0.0}
    assert caplog.messages == ["a node stands still"]
    await trio.sleep(5)
    assert node.directory.nodes["b"].link is link
    await far.send_all(encode(KeepAlive()))
    await wait_all_tasks_blocked()
    assert [each.load.name for each in node.directory.workers("oak")] == ["b/b-0"]
    assert readiness.unready(node.directory, ["oak"]) is None
    assert readiness.engines_up(node.directory) == {"b/b-0": 1.0}
