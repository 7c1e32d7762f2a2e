"""Of several links to one node one counts, and what it brings ends with it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from attrs import define, evolve
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from protocol.errors import ActorLost, LinkReplaced, PeerLost, PeerRefused
from protocol.link import codec
from protocol.link.frames import VERSION, Bye, Cancel, Hello, KeepAlive, Open, encode
from protocol.link.greeting import Incarnation
from protocol.messages.cluster import GetStatus, Leg, NodeState, Offer
from supervisor.cluster import readiness
from supervisor.cluster.carried_links import NAME_CONFLICT
from supervisor.cluster.model_pool import ModelPool
from supervisor.links.link import Link
from supervisor.links.websocket import WebSocketTransport
from supervisor.node import node as node_module
from tests.rig.fake_engine import generate
from tests.rig.gateway import INFO
from tests.rig.links import held_for, serve
from tests.rig.nodes import QUICK, Engine, Node, queued_requests

STARTED_AT = 1_700_000_000
CONFLICT = "two processes call themselves a"


@define(eq=False)
class Transport:
    """One end of a memory stream, about whose acknowledgements nothing is known, or that they always come."""

    stream: trio.abc.Stream
    acknowledged: float | None = None

    async def send_all(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_some(self) -> bytes:
        return bytes(await self.stream.receive_some())

    def acknowledged_s(self) -> float | None:
        return self.acknowledged


def transports(acknowledged: float | None = None) -> tuple[WebSocketTransport, trio.abc.Stream]:
    near, far = memory_stream_pair()
    return cast("WebSocketTransport", Transport(near, acknowledged)), far


Meet = Callable[..., Awaitable[trio.abc.Stream]]


@pytest.fixture
def meet(nursery: trio.Nursery, autojump_clock: MockClock) -> Meet:  # time is virtual
    """Let a node have one more link to a peer, which either of them has dialed, and return the other end of it."""

    async def meet(
        node: Node, peer: str, dialer: str, run: str = "", *, acknowledged: float | None = None, beats: bool = True
    ) -> trio.abc.Stream:
        near, far = transports(acknowledged)

        async def carry() -> None:
            with suppress(PeerLost, PeerRefused):
                await node.links.carried.carry(peer, near, dialer, Incarnation(run, STARTED_AT))

        if beats and not node.links.statistics().dialers:
            nursery.start_soon(node.links.carried.heartbeat_task.run)
        nursery.start_soon(carry)
        await far.send_all(encode(Hello(VERSION, peer, 8)))
        await wait_all_tasks_blocked()
        return far

    return meet


def link_to_b(node: Node) -> Link:
    link = node.directory.nodes["b"].link
    assert link is not None
    return link


def announce(link: Link, state: NodeState) -> None:
    """Let the other end of a link announce its state."""
    assert link.on_announcement is not None
    link.on_announcement(state)


# Of several links ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "peer"), ["ab", "ba"])
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_that_were_dialed_at_once_both_ends_keep_the_one_that_the_first_by_name_has_dialed(
    name: str, peer: str, order: str, meet: Meet, autojump_clock: MockClock
) -> None:
    node = Node(name)
    for dialer in order:
        await meet(node, peer, dialer)
    assert node.links.statistics().dialers == {peer: "a"}
    assert node.links.statistics().dialed == ({"b"} if name == "a" else set())  # the other one is carried no longer


@pytest.mark.parametrize("dialer", ["a", "b"])
async def test_of_two_that_one_end_has_dialed_the_newer_stays_and_it_alone_is_heard(
    dialer: str, meet: Meet, autojump_clock: MockClock
) -> None:
    node = Node("a")
    await meet(node, "b", dialer)
    older = link_to_b(node)
    await meet(node, "b", dialer)
    newer = link_to_b(node)
    assert newer is not older
    for link, is_draining in ((older, False), (newer, True)):
        announce(link, NodeState(draining=True))  # of the older one as if it had arrived already
        assert node.directory.nodes["b"].state.draining is is_draining


async def test_an_answer_over_a_link_that_is_replaced_ends_in_link_replaced(
    meet: Meet, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    node = Node("a")
    caplog.set_level(logging.INFO)
    await meet(node, "b", "b")
    _, answer = link_to_b(node).open(GetStatus(), 0)
    await meet(node, "b", "b")
    with pytest.raises(LinkReplaced):
        await answer.result()
    assert "a link was replaced" in caplog.messages


async def test_a_lost_link_is_gone_at_once_though_a_call_over_it_still_releases_what_it_holds(
    meet: Meet, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    node, released = Node("a"), list[float]()
    nursery.start_soon(serve, node.worker.inbox, held_for(8, released))
    with node.worker.engine.publish(Engine()):
        far = await meet(node, "b", "b")
        await far.send_all(encode(Open(1, codec.encode(generate(tokens_max=9)), 9, "a-0")))
        await wait_all_tasks_blocked()
        await far.send_all(encode(Cancel(1, "left")))
        await wait_all_tasks_blocked()
        await far.aclose()
        await wait_all_tasks_blocked()
        assert (node.linked, released) == (set(), [])
        await trio.sleep(10)
        assert released == [8]


# Two processes of one name ------------------------------------------------------------------


async def test_a_process_that_is_silent_gives_way_to_a_newer_one(meet: Meet, autojump_clock: MockClock) -> None:
    node = Node("a")
    await meet(node, "b", "b", "one", beats=False)  # so nobody has noticed the silence
    first = link_to_b(node)
    await trio.sleep(node.section.silent_s)
    await meet(node, "b", "b", "two")
    assert link_to_b(node) is not first


async def refuse(node: Node, nursery: trio.Nursery) -> None:
    """Let node b refuse this process, since another one has its name."""
    near, far = transports()
    await far.send_all(encode(Bye(NAME_CONFLICT, CONFLICT)))
    nursery.start_soon(node.links.carried.heartbeat_task.run)
    with pytest.raises(PeerRefused, match=CONFLICT):
        await node.links.carried.carry("b", near, "a", Incarnation())
    assert readiness.unready(node.directory, ()) == CONFLICT


async def test_a_process_that_was_refused_is_not_ready_until_it_is_linked(
    meet: Meet, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    node = Node("a")
    await refuse(node, nursery)
    await meet(node, "b", "a")
    assert readiness.unready(node.directory, ()) is None


async def test_a_refusal_expires_and_wakes_whoever_waits_for_readiness(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """Nothing comes or goes when it expires, so the time itself must wake them."""
    node, announced = Node("a"), list[str]()
    await refuse(node, nursery)
    probes = SimpleNamespace(unready=partial(readiness.unready, node.directory, ()))
    gateway = SimpleNamespace(port=SimpleNamespace(shared=False), probes=probes)
    assembly: Any = SimpleNamespace(gateway=gateway, directory=node.directory)
    unused: Any = None
    process = node_module.Node(unused, assembly, unused, unused, lambda: 0.0)
    nursery.start_soon(process.announce_when_ready, partial(announced.append, "ready"))
    await trio.sleep(2 * node.section.retry_max_s)  # as long as it may take to be refused again
    assert announced == []
    assert readiness.unready(node.directory, ()) == CONFLICT
    await trio.sleep(node.section.handshake_s + 1)
    assert announced == ["ready"]


# A node that stands still -------------------------------------------------------------------

OFFER = Offer("b-0", "oak", Leg.BOTH, 4, up=True, engine=INFO)
PATIENT = evolve(QUICK, heartbeat_s=1.0, silent_s=3.0, stalled_s=15.0)


async def test_requests_that_wait_for_an_engine_go_to_a_node_that_goes_on_again(
    meet: Meet, autojump_clock: MockClock
) -> None:
    node = Node("a", section=PATIENT)
    far = await meet(node, "b", "b", acknowledged=0.0)
    link = link_to_b(node)
    announce(link, NodeState((OFFER,)))
    with trio.fail_after(5):
        while not link.stalled:
            await node.directory.wait_changed()
    async with queued_requests(node.worker, 2) as failed:
        assert failed == []
        await far.send_all(encode(KeepAlive()))
        await wait_all_tasks_blocked()
        assert failed == [ActorLost] * 2


async def test_a_node_that_stands_still_is_not_chosen_and_readiness_and_metrics_have_the_reason(
    meet: Meet, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node("a", section=PATIENT)
    del node.directory.local["a-0"]
    far = await meet(node, "b", "b", acknowledged=0.0)
    link, directory = link_to_b(node), node.directory
    announce(link, NodeState((OFFER,)))
    assert [worker.load.name for worker in directory.workers("oak")] == ["b/b-0"]
    pool = ModelPool(directory, "oak")
    with trio.fail_after(3.5):
        await pool.wait_changed()
    assert link.stalled
    assert directory.workers("oak") == []
    assert len(directory.ranked("oak", Leg.BOTH)) == 0
    assert readiness.unready(directory, ["oak"]) == "engine b-0 is on a node that stands still"
    assert readiness.engines_up(directory) == {"b/b-0": 0.0}
    assert caplog.messages == ["a node stands still"]
    await trio.sleep(5)
    assert link_to_b(node) is link
    await far.send_all(encode(KeepAlive()))
    await wait_all_tasks_blocked()
    assert [worker.load.name for worker in directory.workers("oak")] == ["b/b-0"]
    assert readiness.unready(directory, ["oak"]) is None
    assert readiness.engines_up(directory) == {"b/b-0": 1.0}
