"""Nodes link to each other, once each, and link again after a loss."""

from __future__ import annotations

from itertools import permutations

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import LinkLost, LinkReplaced
from supervisor.links.endpoint import Endpoint
from supervisor.links.link import Link
from supervisor.links.websocket import WebSocketTransport
from tests.rig.nodes import LOOPBACK, Node, Reasons, all_linked, link_by_hand, linked_nodes, linked_pair, until


async def break_off(link: Link | None) -> None:
    """Close the connection under a link, which neither end expects."""
    assert link is not None
    assert isinstance(link.transport, WebSocketTransport)
    await trio.aclose_forcefully(link.transport.stream)


# The first link ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
async def test_three_nodes_link_to_each_other_whatever_the_order_they_start_in(
    order: tuple[str, ...], rather_slow: MockClock
) -> None:
    nodes = [Node(name) for name in order]
    async with linked_nodes() as nursery:
        for number, node in enumerate(nodes):
            await nursery.start(node.run)
            for earlier in nodes[:number]:
                node.knows(earlier)
                earlier.knows(node)
        await all_linked(*nodes)
        for one, other in permutations(nodes, 2):
            assert await one.ask(other) == [0, 1, 2]


async def test_of_two_nodes_the_first_by_name_dials_and_there_is_one_link(rather_slow: MockClock) -> None:
    async with linked_pair() as (a, b):
        await trio.sleep(0.3)
        assert a.links.statistics().dialers["b"] == b.links.statistics().dialers["a"] == "a"
        assert (a.links.statistics().dialing, b.links.statistics().dialing) == (frozenset("b"), frozenset())


async def test_a_node_that_does_not_listen_dials_whatever_its_name(rather_slow: MockClock) -> None:
    a, z = Node("a"), Node("z", port=None)
    async with linked_nodes(a, z):
        await all_linked(a, z)
        assert a.links.statistics().dialers["z"] == "z"
        assert await a.ask(z) == await z.ask(a) == [0, 1, 2]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_a_node_that_listens_at_every_address_and_has_no_host_dials(host: str, rather_slow: MockClock) -> None:
    a, z = Node("a"), Node("z", host=host)
    async with linked_nodes(a, z, know=False):
        z.knows(a)
        await all_linked(a, z)
        assert z.directory.address is None
        assert a.links.statistics().dialers["z"] == "z"


async def test_a_node_is_dialed_until_it_is_there(reasons: Reasons, rather_slow: MockClock) -> None:
    with (await trio.open_tcp_listeners(0, host=LOOPBACK))[0].socket as taken:
        endpoint = Endpoint(LOOPBACK, taken.getsockname()[1])
    early, late = Node("a"), Node("b")
    late.links.listen = endpoint
    async with linked_nodes(early) as nursery:
        early.directory.configure("b", str(endpoint))
        early.directory.notify()
        await until(reasons)
        await trio.sleep(0.5)
        (reason,) = reasons()
        assert f"{endpoint} cannot be reached" in reason
        await nursery.start(late.run)
        await all_linked(early, late)


# After a loss ------------------------------------------------------------------------------


async def test_after_a_cut_the_link_comes_back_and_its_streams_have_ended(rather_slow: MockClock) -> None:
    async with linked_pair(b_step_s=0.05) as (a, b), trio.open_nursery() as nursery:
        lost = a.link(b)

        async def cut() -> None:
            await until(lambda: b.asked)
            await break_off(lost)

        nursery.start_soon(cut)
        with pytest.raises(LinkLost):
            await a.ask(b, tokens_max=1000)
        await until(lambda: b.freed == ["r"])
        await until(lambda: a.link(b) not in {None, lost} and a.offers_of(b))
        b.step_s = 0
        assert await a.ask(b) == [0, 1, 2]


async def test_a_greeting_alone_replaces_no_link(rather_slow: MockClock) -> None:
    async with linked_pair() as (a, b):
        link = b.link(a)
        await link_by_hand(b, "a", hello=False, close_after_s=0)
        await trio.sleep(0.1)
        assert b.link(a) is link
        assert link is not None
        assert not link.lost
        assert await a.ask(b) == [0, 1, 2]


async def test_a_node_that_leaves_sends_its_reason(reasons: Reasons, rather_slow: MockClock) -> None:
    async with linked_pair() as (a, _):
        a.links.send_bye("node a shuts down")
        await trio.sleep(0.1)
        a.scope.cancel()
        await until(lambda: "draining: node a shuts down" in reasons())


# Joining -----------------------------------------------------------------------------------


async def answered(one: Node, other: Node) -> list[int]:
    """Ask as a router does: where both ends have dialed, what began on the link that is replaced is asked again."""
    try:
        return await one.ask(other)
    except LinkReplaced:
        return await one.ask(other, request_id="again")


@pytest.mark.parametrize("name", ["0-first", "z-last"])
async def test_a_node_that_joins_one_node_is_learned_by_all_leaves_and_comes_back(
    name: str, rather_slow: MockClock
) -> None:
    a, b = Node("a"), Node("b")
    async with linked_nodes(a, b) as nursery:
        joiner = Node(name, join=(b.address,))
        await nursery.start(joiner.run)
        await all_linked(a, b, joiner)
        assert await answered(a, joiner) == await answered(joiner, a) == [0, 1, 2]
        joiner.links.send_bye("it leaves")
        joiner.scope.cancel()
        await until(lambda: name not in a.linked | b.linked)
        assert a.offers_of(joiner) == b.offers_of(joiner) == []
        elsewhere = Node(name, join=(a.address,))  # at another port, which nobody has been told of
        await nursery.start(elsewhere.run)
        await all_linked(a, b, elsewhere)
        assert await answered(b, elsewhere) == [0, 1, 2]


@pytest.mark.parametrize("joins", [("j", "k"), ("a", "a")], ids=["two that join", "one of the file, twice"])
async def test_nodes_that_may_both_dial_keep_one_link(joins: tuple[str, str], rather_slow: MockClock) -> None:
    b = Node("b")
    async with linked_nodes(b) as nursery:
        if joins[0] == joins[1]:
            nodes = [b, Node(joins[0], join=(b.address, b.address))]
            nodes[1].directory.configure("b", b.address)
        else:
            nodes = [b, *(Node(name, join=(b.address,)) for name in joins)]
        for node in nodes[1:]:
            await nursery.start(node.run)
        await all_linked(*nodes)
        await trio.sleep(0.3)
        links = [one.link(other) for one, other in permutations(nodes, 2)]
        await trio.sleep(0.7)
        assert links == [one.link(other) for one, other in permutations(nodes, 2)]
        assert not any(link is None or link.lost for link in links)
