"""Of several links between two nodes one stays, and it alone counts."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from protocol.cluster import NodeState
from protocol.frames import VERSION, Hello, encode
from tests.nodes import Node


@pytest.fixture
def meet(nursery, autojump_clock):  # time is virtual
    """Let a node have one more link to a peer, which either of them has dialed."""

    async def meet(node, peer, dialer):
        near, far = trio.testing.memory_stream_pair()
        nursery.start_soon(node.links._carry, peer, near, dialer)
        await far.send_all(encode(Hello(VERSION, peer, 8)))
        await trio.testing.wait_all_tasks_blocked()

    return meet


@pytest.mark.parametrize(("name", "peer"), ["ab", "ba"])
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_that_were_dialed_at_once_both_ends_keep_the_one_that_the_first_by_name_has_dialed(
    name, peer, order, meet
):
    node = Node(name)
    for dialer in order:
        await meet(node, peer, dialer)
    kept = node.links._carried[peer]
    assert kept.dialer == "a"
    assert node.directory.nodes[peer][1] is kept.link
    assert node.links._dialed == ({"b"} if name == "a" else set())  # the other one is carried no longer


@pytest.mark.parametrize("dialer", ["a", "b"])
async def test_of_two_that_one_end_has_dialed_the_newer_stays(dialer, meet):
    node = Node("a")
    await meet(node, "b", dialer)
    first = node.directory.nodes["b"][1]
    await meet(node, "b", dialer)
    assert node.directory.nodes["b"][1] not in {None, first}


async def test_what_is_still_told_over_an_older_link_is_not_believed(meet):
    node = Node("a")
    await meet(node, "b", "b")
    older = node.directory.nodes["b"][1]
    await meet(node, "b", "b")
    older.told(NodeState(draining=True))  # it lay there already, to be read in the same moment
    assert not node.directory.nodes["b"][0].draining
    node.directory.nodes["b"][1].told(NodeState(draining=True))
    assert node.directory.nodes["b"][0].draining
