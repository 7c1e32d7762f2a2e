"""Which other nodes are recorded: their addresses by several sources, how many there may be, and when one is forgotten."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from protocol.messages.cluster import Neighbour, NodeState, check_state
from supervisor.cluster.directory import Directory
from supervisor.cluster.node_records import (
    FORGET_S,
    NODES_MAX,
    UNCONFIRMED_BY_NODE_MAX,
    UNCONFIRMED_MAX,
)
from tests.rig.links import idle_link
from tests.rig.nodes import linked_directory


def address(directory: Directory, name: str) -> str | None:
    return directory.nodes[name].address


async def test_an_address_in_the_file_precedes_the_nodes_own_and_that_the_first_rumour() -> None:
    directory, _ = linked_directory()
    directory.configure("filed", "h:1")
    directory.merge_state("far", NodeState(neighbours=(Neighbour("filed", "liar:1"), Neighbour("heard", "h:2"))))
    assert (address(directory, "filed"), address(directory, "heard")) == ("h:1", "h:2")
    directory.linked("other", idle_link())
    directory.merge_state("other", NodeState(neighbours=(Neighbour("heard", "h:3"), Neighbour("far", "h:4"))))
    assert (address(directory, "heard"), address(directory, "far")) == ("h:2", "h:4")
    directory.linked("heard", idle_link())
    directory.merge_state("heard", NodeState(neighbours=(Neighbour("heard", "h:5"), Neighbour("here", "liar:2"))))
    assert address(directory, "heard") == "h:5"
    directory.linked("filed", idle_link())
    directory.merge_state("filed", NodeState(neighbours=(Neighbour("filed", "h:6"),)))
    assert address(directory, "filed") == "h:1"
    assert "here" not in directory.nodes


async def test_two_nodes_with_different_addresses_of_a_third_stop_announcing() -> None:
    one, two = Directory("one"), Directory("two")
    one.linked("two", idle_link())
    two.linked("one", idle_link())
    one.merge_state("two", NodeState(neighbours=(Neighbour("x", "h:1"),), routes=True))
    two.merge_state("one", NodeState(neighbours=(Neighbour("x", "h:2"),), routes=True))
    one.linked("x", idle_link())
    two.linked("x", idle_link())
    before = one.state(), two.state()
    assert before[0].neighbours != before[1].neighbours
    one.merge_state("two", two.state())
    two.merge_state("one", one.state())
    assert (one.state(), two.state()) == before


async def test_rumours_are_limited_in_number_and_keep_no_linked_node_out() -> None:
    directory, _ = linked_directory()
    directory.address = "h:1"
    tellers = UNCONFIRMED_MAX // UNCONFIRMED_BY_NODE_MAX
    for teller in range(tellers + 2):
        directory.linked(f"teller-{teller}", idle_link())
        for more in range(3):
            names = tuple(Neighbour(f"n{teller}-{more}-{n}", "h:2") for n in range(4000))
            directory.merge_state(f"teller-{teller}", NodeState(neighbours=names))
            of_tellers = UNCONFIRMED_BY_NODE_MAX * min(teller + 1, tellers)
            assert len(directory.nodes) == 1 + teller + 1 + of_tellers < NODES_MAX
    assert directory.records.has_room_for("one more")
    assert Neighbour("here", "h:1", routes=True) in check_state(directory.state()).neighbours


async def test_one_node_that_lies_keeps_out_nothing_that_others_say() -> None:
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState(neighbours=tuple(Neighbour(f"n{n}", "h:2") for n in range(4000))))
    directory.linked("other", idle_link())
    directory.merge_state("other", NodeState(neighbours=(Neighbour("n3999", "h:3"), Neighbour("n0", "h:3"))))
    assert (address(directory, "n3999"), address(directory, "n0")) == ("h:3", "h:2")


async def test_nodes_of_a_large_cluster_are_learned_of_as_links_to_them_come() -> None:
    directory, _ = linked_directory()
    names = [f"n{number}" for number in range(300)]
    state = NodeState(neighbours=tuple(Neighbour(name, f"{name}:1") for name in names))
    directory.merge_state("far", state)
    for _ in range(len(names)):
        if (unlinked := next((name for name, node in directory.nodes.items() if node.link is None), None)) is not None:
            directory.linked(unlinked, idle_link())
            directory.merge_state(unlinked, state)
    assert {name for name, node in directory.nodes.items() if node.link is not None} == {"far", *names}


async def test_a_node_is_a_rumour_until_there_was_a_link_to_it() -> None:
    directory, _ = linked_directory()
    directory.configure("filed", None)
    directory.merge_state("far", NodeState(neighbours=(Neighbour("heard", "h:1"), Neighbour("filed", "h:2"))))
    names = ("heard", "filed", "far", "nobody")
    assert [directory.records.is_rumour(name) for name in names] == [True, False, False, False]
    directory.linked("heard", link := idle_link())
    directory.unlinked("heard", link)
    assert not directory.records.is_rumour("heard"), "it is dialed again at once"


async def test_a_node_announces_only_neighbours_that_it_has_a_link_to() -> None:
    directory, link = linked_directory()
    directory.configure("filed", "h:1")
    directory.merge_state("far", NodeState(neighbours=(Neighbour("far", "h:2"), Neighbour("heard", "h:3"))))
    assert directory.state().neighbours == (Neighbour("far", "h:2"),)
    directory.unlinked("far", link)
    assert directory.state().neighbours == ()
    assert set(directory.nodes) == {"filed", "far", "heard"}


async def forgotten(directory: Directory, seconds: float) -> list[str]:
    """Return the nodes that a directory forgets within a time."""
    names: list[str] = []
    for _ in range(int(seconds) // 60):
        await trio.sleep(60)
        names += await directory.records.forget()
    return sorted(names)


async def test_a_node_that_is_named_no_more_is_forgotten_after_a_while_and_can_come_back(
    autojump_clock: MockClock,
) -> None:
    directory, link = linked_directory()
    directory.configure("filed", None)
    state = NodeState(neighbours=(Neighbour("heard", "h:1"), Neighbour("another", "h:2")))
    directory.merge_state("far", state)
    assert await forgotten(directory, 10 * FORGET_S) == [], "they are named by a node that a link goes to"
    directory.merge_state("far", NodeState(neighbours=(Neighbour("another", "h:2"),)))
    assert await forgotten(directory, FORGET_S) == []
    assert await forgotten(directory, 60) == ["heard"]
    directory.unlinked("far", link)
    assert await forgotten(directory, FORGET_S / 2) == []
    directory.linked("far", link)
    directory.merge_state("far", state)
    assert set(directory.nodes) == {"filed", "far", "heard", "another"}
    assert await forgotten(directory, 2 * FORGET_S) == []
    directory.unlinked("far", link)
    assert await forgotten(directory, 10 * FORGET_S) == ["another", "far", "heard"]
    assert set(directory.nodes) == {"filed"}
