"""Of several links between two nodes one stays, and it alone counts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from protocol.cluster import GetStatus, NodeState
from protocol.errors import LinkReplaced, PeerLost, PeerRefused
from protocol.frames import VERSION, Bye, FrameReader, Hello, encode
from protocol.greeting import Incarnation
from supervisor.cluster import readiness
from supervisor.cluster.carried_links import NAME_CONFLICT
from supervisor.cluster.mesh import Mesh
from supervisor.links.endpoint import Endpoint
from supervisor.node.node import _Node
from tests.rig.nodes import Node


def pair() -> tuple[
    trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream],
    trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream],
]:
    """Two ends of a wire; what happens below it cannot be known."""
    near, far = trio.testing.memory_stream_pair()
    near.acknowledged_s = lambda: None  # type: ignore[attr-defined]
    return near, far


@pytest.fixture
def meet(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> Callable[..., Awaitable[object]]:  # time is virtual
    """Let a node have one more link to a peer, which either of them has dialed."""

    async def meet(
        node, peer, dialer, run: str = ""
    ) -> trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]:
        near, far = pair()

        async def carry() -> None:
            with suppress(PeerLost, PeerRefused):
                await node.links.carried.carry(peer, near, dialer, Incarnation(run, 1_700_000_000))

        if not node.links.statistics().dialers:
            nursery.start_soon(node.links.carried.heartbeat_task.run)
        nursery.start_soon(carry)
        await far.send_all(encode(Hello(VERSION, peer, 8)))
        await trio.testing.wait_all_tasks_blocked()
        return far

    return meet


@pytest.mark.parametrize(("name", "peer"), ["ab", "ba"])
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_that_were_dialed_at_once_both_ends_keep_the_one_that_the_first_by_name_has_dialed(
    name, peer, order: str, meet: Callable[..., Awaitable[object]], autojump_clock: trio.testing.MockClock
) -> None:
    node = Node(name)
    for dialer in order:
        await meet(node, peer, dialer)
    assert node.links.statistics().dialers == {peer: "a"}
    assert node.links.statistics().dialed == ({"b"} if name == "a" else set())  # the other one is carried no longer


@pytest.mark.parametrize("dialer", ["a", "b"])
async def test_of_two_that_one_end_has_dialed_the_newer_stays(
    dialer: str, meet: Callable[..., Awaitable[object]], autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    await meet(node, "b", dialer)
    first = node.directory.nodes["b"].link
    await meet(node, "b", dialer)
    assert node.directory.nodes["b"].link not in {None, first}


async def test_what_is_still_told_over_an_older_link_is_not_believed(
    meet: Callable[..., Awaitable[object]], autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    await meet(node, "b", "b")
    older = node.directory.nodes["b"].link
    await meet(node, "b", "b")
    older.on_announcement(NodeState(draining=True))  # it lay there already, to be read in the same moment
    assert not node.directory.nodes["b"].state.draining
    node.directory.nodes["b"].link.on_announcement(NodeState(draining=True))
    assert node.directory.nodes["b"].state.draining


# Two processes of one name ------------------------------------------------------------------


async def test_b9_another_process_of_a_name_is_refused_and_told_why_while_the_first_is_heard(
    meet: Callable[..., Awaitable[object]], autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    await meet(node, "b", "b", "one")
    first = node.directory.nodes["b"].link
    far = await meet(node, "b", "b", "two")
    (bye,) = FrameReader().feed(await far.receive_some())  # type: ignore[attr-defined]
    assert bye.code == NAME_CONFLICT
    assert "one, started Tue, 14 Nov 2023 22:13:20 GMT is linked to a, so two, started" in bye.detail
    assert node.directory.nodes["b"].link is first
    assert not first.lost


async def test_b9_another_process_that_is_dialed_under_a_second_address_is_refused_and_told_why(
    meet: Callable[..., Awaitable[object]],
    nursery: trio.Nursery,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The first has been dialed from here, too: a second link to that very one would be closed without a word."""
    node = Node("a")
    await meet(node, "b", "a", "one")
    first, (near, far) = node.directory.nodes["b"].link, pair()

    async def dial(at, context, within_s, talk) -> None:
        await talk(near)

    async def greeted(links, role, expects, wire) -> tuple[str, Incarnation]:
        return "b", Incarnation("two", 1_700_000_000)

    node.links.dial = dial
    monkeypatch.setattr(Mesh, "_greet", greeted)
    nursery.start_soon(node.links._keep_linked, None, Endpoint("elsewhere", 7400))
    (bye,) = FrameReader().feed(await far.receive_some())
    assert bye.code == NAME_CONFLICT
    assert "one, started Tue, 14 Nov 2023 22:13:20 GMT is linked to a, so two, started" in bye.detail
    assert node.directory.nodes["b"].link is first
    assert not first.lost


async def test_b9_a_process_that_is_silent_gives_way_to_a_newer_one(
    meet: Callable[..., Awaitable[object]], autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    await meet(node, "b", "b", "one")
    first = node.directory.nodes["b"].link
    first._liveness.received_at -= node.section.silent_s  # and it has not been noticed yet
    await meet(node, "b", "b", "two")
    assert node.directory.nodes["b"].link not in {None, first}


async def test_b9_whoever_is_refused_says_so_in_its_readiness_until_it_is_linked(
    meet: Callable[..., Awaitable[object]], nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    near, far = pair()
    await far.send_all(encode(Bye(NAME_CONFLICT, "two processes call themselves a")))
    nursery.start_soon(node.links.carried.heartbeat_task.run)
    with pytest.raises(PeerRefused, match="two processes call themselves a"):
        await node.links.carried.carry("b", near, "a", Incarnation())
    assert readiness.unready(node.directory, ()) == "two processes call themselves a"
    await meet(node, "b", "a")
    assert readiness.unready(node.directory, ()) is None


async def test_who_has_refused_a_process_and_is_gone_for_good_does_not_keep_it_from_being_ready(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a")
    near, far = trio.testing.memory_stream_pair()
    near.acknowledged_s = lambda: None  # type: ignore[attr-defined]  # what no kernel carries, no kernel acknowledges
    await far.send_all(encode(Bye(NAME_CONFLICT, "two processes call themselves a")))
    nursery.start_soon(node.links.carried.heartbeat_task.run)
    with pytest.raises(PeerRefused):
        await node.links.carried.carry("b", near, "a", Incarnation())
    await trio.sleep(2 * node.section.retry_max_s)  # as long as it may take to be refused again
    assert readiness.unready(node.directory, ()) == "two processes call themselves a"
    await trio.sleep(60)
    assert readiness.unready(node.directory, ()) is None


async def test_b9_a_node_whose_twin_claims_its_name_no_more_says_that_it_is_ready(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing comes or goes when a claim expires: who waits for that is woken by the time itself."""
    node, said = Node("a"), []
    near, far = pair()
    await far.send_all(encode(Bye(NAME_CONFLICT, "two processes call themselves a")))
    nursery.start_soon(node.links.carried.heartbeat_task.run)
    with pytest.raises(PeerRefused):
        await node.links.carried.carry("b", near, "a", Incarnation())
    gateway = SimpleNamespace(unready=partial(readiness.unready, node.directory, ()))
    waits = _Node(None, SimpleNamespace(gateway=gateway, directory=node.directory), None, None, 0.0)
    nursery.start_soon(waits._announce_when_ready, partial(said.append, "ready"))
    section = node.section
    await trio.sleep(2 * section.retry_max_s)
    assert said == []
    await trio.sleep(section.handshake_s + 1)
    assert said == ["ready"]


async def test_b9_an_answer_over_a_link_that_is_replaced_ends_in_link_replaced(
    meet: Callable[..., Awaitable[object]],
    nursery: trio.Nursery,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    node = Node("a")
    caplog.set_level(logging.INFO)
    await meet(node, "b", "b")
    _, answer = node.directory.nodes["b"].link.open(GetStatus(), 0)
    await meet(node, "b", "b")
    with pytest.raises(LinkReplaced):
        await answer.result()
    assert "a link was replaced" in caplog.messages
