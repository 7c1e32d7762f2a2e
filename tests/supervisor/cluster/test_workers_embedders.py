"""Embedders among the workers of a cluster: what they are asked, what they count, and who hears of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.embedder import embedder
from actors.engines.embedding.limits import EmbedderLimits
from actors.engines.simulated.embedder import vector
from protocol.errors import PeerViolation
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.embedding import Embed, EmbeddingInfo
from protocol.messages.engine import EngineInfo
from supervisor.cluster import models, readiness
from supervisor.cluster.announcements import state_for
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_checks import WIDTH_MAX, check_engine
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.engines.work import embed_inbox
from supervisor.links.link import Link
from supervisor.links.serving import Service
from supervisor.supervision.registration import Registration
from tests.rig.embedders import EMBEDDER, SCORER, SCORES, VECTORS, running_embedder, simulated_embedder, text
from tests.rig.encoders import new_id
from tests.rig.links import idle_link
from tests.rig.network import sim_pair
from tests.rig.nodes import linked_directory

OFFER = Offer("nearby", "oak", Leg.EMBED, 4, True, EMBEDDER)


def add_embedder(directory: Directory) -> LocalWorker:
    """Give a node an embedder that is down."""
    address, inbox = embed_inbox(8)
    registration: Registration[Any] = Registration(directory.notify)
    worker = directory.local["nearby"] = LocalWorker(
        node=directory.name,
        idle_offer=evolve(OFFER, up=False, engine=None),
        address=address,
        engine=registration,
        inbox=inbox,
        directory=directory,
    )
    return worker


@asynccontextmanager
async def embedding_node() -> AsyncIterator[tuple[RemoteWorker, Directory, Link]]:
    """An embedder that runs on node `far`, as node `here` has it over a link, its node's directory, and that link."""
    here, far, engine = Directory("here"), Directory("far"), simulated_embedder()
    worker = add_embedder(far)
    near_end, far_end = sim_pair()
    asker = Link(near_end, Peer("here", serves_max=0))
    guarded = cast("Service", EngineService(worker).for_node("here"))
    server = Link(far_end, Peer("far", serves_max=8), {("nearby", Embed): guarded})
    async with running_embedder(engine), trio.open_nursery() as nursery:
        for run in (asker.run, server.run):
            nursery.start_soon(run)
        await nursery.start(embedder, worker.inbox, engine, 4, EmbedderLimits())
        await asker.wait_ready()
        here.linked("far", asker)
        with worker.engine.publish(cast("Any", engine)):
            here.merge_state("far", NodeState((worker.offer,)))
            (remote,) = here.records["far"].workers.values()
            yield remote, far, asker
        nursery.cancel_scope.cancel()


async def test_vectors_of_another_node_cross_the_link_as_bytes(autojump_clock: MockClock) -> None:
    async with embedding_node() as (remote, far, _), trio.open_nursery() as nursery:
        request = Embed(new_id(1), (text(1, 2), text(3)), dimensions=4)

        async def ask() -> None:
            async with remote.ask(request, 0) as answer:
                vectors = await answer.result()
            assert vectors is not None
            expected = [vector(item, VECTORS, 4).tobytes() for item in request.items]
            assert (vectors.data.shape, bytes(vectors.data.data)) == ((2, 4), b"".join(expected))

        nursery.start_soon(ask)
        await trio.sleep(0.5)
        offer, load = far.local["nearby"].offer, remote.load
        assert (offer.running, offer.tokens) == (1, 3)
        assert (load.busy, load.tokens, load.leg) == (1, 3, Leg.EMBED)


async def test_a_node_that_leaves_at_any_moment_leaves_nothing_behind(autojump_clock: MockClock) -> None:
    async with embedding_node() as (remote, far, link):
        for tenths in range(0, 20, 2):
            with trio.move_on_after(tenths / 10):
                async with remote.ask(Embed(new_id(tenths), (text(1),)), 0) as answer:
                    await answer.result()
            await trio.sleep(3)
            assert (remote.in_flight.own.requests, len(link.peer.asked)) == (0, 0)
            assert far.local["nearby"].offer.tokens == 0


# Whom nodes hear of ---------------------------------------------------------------------------


async def test_an_embedder_is_offered_only_to_nodes_that_take_embedders() -> None:
    directory = Directory("back", routes=False)
    add_embedder(directory)
    for takes in (False, True):
        directory.linked(f"takes {takes}", idle_link())
        directory.merge_state(f"takes {takes}", NodeState(routes=True, takes_embedders=takes))
    offered = {node: [offer.name for offer in state_for(directory, node).offers] for node in directory.nodes}
    assert offered == {"takes False": [], "takes True": ["nearby"]}
    assert state_for(directory, "takes True").takes_embedders
    assert state_for(Directory("other"), "any").takes_embedders
    assert directory.state().takes_embedders
    assert [offer.leg for offer in directory.state().offers] == [Leg.EMBED], "an operator sees all"


# Where they stand in the directory --------------------------------------------------------------


async def test_an_embedder_is_ranked_by_its_own_leg_and_sets_the_limits_of_its_model() -> None:
    directory, _ = linked_directory()
    small = evolve(OFFER, name="small", running=3, engine=evolve(EMBEDDER, request_tokens_max=16))
    directory.merge_state("far", NodeState((small, OFFER)))
    pool = ModelPool(directory, "oak")
    assert [worker.name for worker in pool.embedders()] == ["nearby", "small"]
    assert list(directory.ranked("oak", Leg.BOTH)) == pool.watchable() == pool.encoders() == []
    assert models.request_tokens_max(directory, "oak") == 16


@pytest.mark.parametrize(
    ("offers", "unready"),
    [
        ((OFFER,), None),
        ((evolve(OFFER, up=False, why="failed: the GPU is gone"),), "engine nearby failed: the GPU is gone"),
        ((evolve(OFFER, up=False), evolve(OFFER, name="other")), None),
    ],
)
async def test_a_model_of_vectors_is_ready_with_an_embedder(offers: tuple[Offer, ...], unready: str | None) -> None:
    directory = Directory("front")
    directory.linked("far", idle_link())
    directory.merge_state("far", NodeState(offers))
    assert readiness.unready(directory, ["oak"]) == unready
    assert readiness.without_encoders(directory, ["oak"]) is None
    assert readiness.unpaired(directory) == {}


# What another node may say of one ---------------------------------------------------------------


@pytest.mark.parametrize("engine", [EMBEDDER, SCORER, evolve(EMBEDDER, kv_tokens_max=0, page_size=0)])
def test_an_embedder_that_can_be_is_accepted(engine: EngineInfo) -> None:
    check_engine(evolve(OFFER, engine=engine))


def of(embedding: EmbeddingInfo | None) -> Offer:
    return evolve(OFFER, engine=evolve(EMBEDDER, embedding=embedding))


@pytest.mark.parametrize(
    "offer",
    [
        of(None),
        of(evolve(VECTORS, width=0)),
        of(evolve(VECTORS, width=WIDTH_MAX + 1)),
        of(evolve(SCORES, width=2)),
        of(evolve(VECTORS, matryoshka_dimensions=(4, 9))),
        of(evolve(VECTORS, matryoshka_dimensions=(1,) * 65)),
        evolve(OFFER, engine=evolve(EMBEDDER, vocabulary_size=0)),
        evolve(OFFER, engine=evolve(EMBEDDER, kv_tokens_max=-1)),
        evolve(OFFER, leg=Leg.BOTH),
    ],
)
def test_an_embedder_that_cannot_be_is_a_violation(offer: Offer) -> None:
    with pytest.raises(PeerViolation):
        check_engine(offer)
