"""The directory: the workers that nodes announce, those of cluster.toml, and what is left when a link is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import LinkLost, PeerLost, PeerViolation
from protocol.messages.adapters import ADAPTERS_MAX, Adapter
from protocol.messages.cluster import Leg, Neighbour, NodeState, Offer, check_state
from protocol.messages.engine import EngineInfo, encoder_info
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_checks import ADDRESS_BYTES_MAX, ENGINE_NAME_LENGTH_MAX, OPERATIONS_MAX
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import RemoteWorker
from tests.rig.encoders import MEDIA
from tests.rig.fake_engine import generate
from tests.rig.links import idle_link
from tests.rig.nodes import linked_directory

INFO = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
ONE = Offer("one", "oak", Leg.BOTH, 4, True, INFO)
TWO = Offer("two", "oak", Leg.BOTH, 4, True, INFO, running=2, waiting=1, tokens=70)


def names(offers: Iterable[Offer]) -> list[str]:
    return sorted(offer.name for offer in offers)


def workers(directory: Directory) -> list[RemoteWorker]:
    return cast("list[RemoteWorker]", directory.workers("oak"))


# What is announced ------------------------------------------------------------------------


async def test_an_announced_worker_appears_changes_and_vanishes() -> None:
    directory, link = linked_directory()
    assert workers(directory) == []
    directory.merge_state("far", NodeState((ONE, TWO)))
    one, two = workers(directory)
    assert (one.load.name, two.load.name) == ("far/one", "far/two")
    assert (two.load.busy, two.load.slots, two.load.tokens) == (3, 4, 70)
    assert one.link is two.link is link
    directory.merge_state("far", NodeState((evolve(ONE, running=4), evolve(TWO, up=False))))
    assert workers(directory) == [one]
    assert one.load.busy == 4
    directory.merge_state("far", NodeState((TWO,)))
    assert names(directory.offers("oak")) == ["two"]
    assert directory.offers("elm") == []
    assert directory.workers("elm") == []


async def test_a_node_that_drains_is_not_chosen_and_still_listed() -> None:
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState((ONE,), draining=True))
    assert workers(directory) == []
    assert directory.draining_workers == {"far/one"}
    assert names(directory.offers()) == ["one"]


async def test_two_nodes_may_have_workers_of_one_name() -> None:
    directory, _ = linked_directory()
    directory.linked("near", idle_link())
    directory.merge_state("far", NodeState((ONE,), draining=True))
    directory.merge_state("near", NodeState((evolve(ONE, running=3),)))
    running = {name: offer.running for name, offer in directory.offers_by_name("oak").items()}
    assert running == {"far/one": 0, "near/one": 3}
    assert directory.offers_by_name("elm") == {}
    assert directory.draining_workers == {"far/one"}
    assert ModelPool(directory, "oak").expected() == {"far/one": Leg.BOTH, "near/one": Leg.BOTH}


# A link that is lost ----------------------------------------------------------------------


async def test_a_lost_link_takes_down_announced_workers_and_leaves_those_of_the_file() -> None:
    directory, link = Directory("here"), idle_link()
    directory.configure("far", "h:1", (Offer("one", "oak", Leg.BOTH, 4, up=False),))
    assert [(offer.name, offer.up, offer.engine) for offer in directory.offers()] == [("one", False, None)]
    directory.linked("far", link)
    directory.merge_state("far", NodeState((evolve(ONE, running=3, tokens=9), TWO)))
    directory.unlinked("far", link)
    assert workers(directory) == []
    (offer,) = directory.offers()
    assert (offer.name, offer.up, offer.running, offer.tokens) == ("one", False, 0, 0)
    assert offer.engine == INFO  # a client's limits stay what they were
    directory.linked("far", idle_link())
    assert workers(directory) == []
    directory.merge_state("far", NodeState((ONE, TWO)))
    assert names(worker.offer for worker in workers(directory)) == ["one", "two"]


async def test_the_end_of_an_older_link_changes_nothing() -> None:
    directory, older = linked_directory()
    directory.merge_state("far", NodeState((ONE,)))
    newer = idle_link()
    directory.linked("far", newer)
    directory.unlinked("far", older)
    directory.unlinked("nobody", older)
    (worker,) = workers(directory)
    assert worker.link is newer


async def test_no_worker_behind_a_lost_link_is_chosen(autojump_clock: MockClock) -> None:
    directory, link = linked_directory()
    directory.merge_state("far", NodeState((ONE,)))
    link.abort(PeerLost("cut"))
    assert workers(directory) == []


async def test_a_request_to_a_worker_without_a_link_fails_and_is_not_counted() -> None:
    directory, link = linked_directory()
    directory.merge_state("far", NodeState((ONE,)))
    (worker,) = workers(directory)
    directory.unlinked("far", link)
    with pytest.raises(LinkLost, match="no link to node far"):
        async with worker.ask(generate(), 1):
            pass
    assert worker.in_flight.own.requests == 0


# Violations -------------------------------------------------------------------------------

IMPOSSIBLE = [
    NodeState((ONE, ONE)),
    NodeState((evolve(ONE, running=-1),)),
    NodeState((evolve(ONE, kv_used=float("nan")),)),
    NodeState((evolve(ONE, model="x\n"),)),
    NodeState(tuple(evolve(ONE, name=f"w{n}") for n in range(1025))),
    NodeState(neighbours=tuple(Neighbour(f"n{n}", None) for n in range(4097))),
    NodeState(neighbours=(Neighbour("x", "nowhere"),)),
    NodeState((evolve(ONE, leg=Leg.ENCODE, engine=encoder_info("x", "1", evolve(MEDIA, width=0), 8)),)),
    NodeState((evolve(ONE, engine=evolve(INFO, request_tokens_max=0)),)),
    NodeState((evolve(ONE, engine=evolve(INFO, hand_off_address=bytes(ADDRESS_BYTES_MAX + 1))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, operations=("x",) * (OPERATIONS_MAX + 1))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, adapters=(Adapter("x", "1"),) * (ADAPTERS_MAX + 1))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, adapters=(Adapter("a b", "1"),))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, adapters=(Adapter("a", ""),))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, adapters=(Adapter("a", "1" * 65),))),)),
    NodeState((evolve(ONE, engine=evolve(INFO, operations=("x" * (ENGINE_NAME_LENGTH_MAX + 1),))),)),
]


@pytest.mark.parametrize("state", IMPOSSIBLE, ids=lambda state: repr(state)[:70])
async def test_an_impossible_announcement_is_a_violation_and_changes_nothing(state: NodeState) -> None:
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState((TWO,)))
    with pytest.raises(PeerViolation):
        directory.merge_state("far", check_state(state))
    assert directory.offers() == [TWO]
    assert set(directory.nodes) == {"far"}


# Several nodes that route -------------------------------------------------------------------------


def test_each_node_that_routes_knows_how_many_do_and_its_own_place() -> None:
    places = {}
    for name in ("front-0", "front-1", "front-2"):
        directory = Directory(name)
        for other in {"front-0", "front-1", "front-2", "worker"} - {name}:
            directory.configure(other, None, routes=other != "worker")
        places[name] = directory.routers
    assert places == {"front-0": (3, 0), "front-1": (3, 1), "front-2": (3, 2)}
    assert Directory("front-0").routers == (1, 0)


async def test_a_router_that_joins_counts_from_its_announcement_on() -> None:
    directory, _ = linked_directory()
    assert directory.routers == (1, 0)
    directory.merge_state("far", NodeState((ONE,), routes=True))
    assert directory.routers[0] == 2
    (worker,) = workers(directory)
    assert (worker.load.routers, worker.load.own, worker.load.unstarted) == (2, 0, 0)


@pytest.mark.parametrize(
    ("own", "other", "routes", "linked"),
    [
        (None, None, True, False),
        ("here:1", None, True, True),
        (None, "there:1", True, True),
        (None, None, False, True),
    ],
)
def test_two_gateways_of_which_neither_listens_need_no_link(
    own: str | None, other: str | None, routes: bool, linked: bool
) -> None:
    directory = Directory("front-0", address=own)
    directory.configure("front-1", other, routes=routes)
    assert directory.should_link("front-1") is linked


async def test_only_workers_whose_nodes_know_the_question_are_watched(autojump_clock: MockClock) -> None:
    directory, _ = linked_directory()
    both = evolve(ONE, name="both")
    decode = evolve(both, name="decode", leg=Leg.DECODE)
    pool = ModelPool(directory, ONE.model)
    directory.merge_state("far", NodeState((both, decode)))
    assert pool.watchable() == [], "another version would end the link"
    directory.merge_state("far", NodeState((both, decode), watched=True))
    assert [worker.name for worker in pool.watchable()] == ["both"]
