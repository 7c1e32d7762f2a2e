"""Encoders among the workers of a cluster: what they are asked, what they count, and who hears of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.encoder import encoder
from actors.engines.encoding.limits import EncoderLimits
from actors.kit.offload import run_inline
from protocol.errors import ActorLost, NotReady, RequestError
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.engine import EngineInfo, encoder_info
from protocol.messages.generation import Grammar, GrammarKind
from protocol.messages.media import Encode
from supervisor.cluster import models, readiness
from supervisor.cluster.announcements import state_for
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.engines.engine_grammars import EngineGrammars
from supervisor.engines.grammar_checks import check_grammar
from supervisor.engines.work import encode_inbox
from supervisor.links.link import Link
from supervisor.links.serving import Service
from supervisor.supervision.registration import Registration
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.encoders import (
    MEDIA,
    EncoderByHand,
    encode,
    image,
    new_id,
    noting_encoder,
    running_encoder,
    video,
)
from tests.rig.links import idle_link, serve
from tests.rig.network import sim_pair
from tests.rig.nodes import linked_directory, unlink

EYES = encoder_info("x", "1", MEDIA, 8)
ENCODER = Offer("eyes", "oak", Leg.ENCODE, 4, True, EYES)
TEXT = EngineInfo("x", "1", 100, 64, 640, 64, 8, 1, True)
ENGINE = Offer("one", "oak", Leg.BOTH, 4, True, TEXT)


def add_encoder(directory: Directory, name: str = "eyes", slots: int = 2) -> LocalWorker:
    """Give a node an encoder that is down."""
    address, inbox = encode_inbox(2)
    registration: Registration[Any] = Registration(directory.notify)
    offer = Offer(name, "oak", Leg.ENCODE, slots, up=False)
    worker = directory.local[name] = LocalWorker(
        node=directory.name,
        idle_offer=offer,
        address=address,
        engine=registration,
        inbox=inbox,
        directory=directory,
    )
    return worker


async def take_a_while(_: AnyCall, answer: AnyAnswer, seconds: float) -> None:
    await trio.sleep(seconds)
    answer.fail(NotReady("it has slept"))


@asynccontextmanager
async def two_nodes(seconds: float = 4.0) -> AsyncIterator[tuple[RemoteWorker, Directory]]:
    """An encoder of node `far` as node `here` has it over a link, and the directory of its own node."""
    here, far = Directory("here"), Directory("far")
    worker = add_encoder(far)
    near_end, far_end = sim_pair()
    asker = Link(near_end, Peer("here", serves_max=0))
    guarded = cast("Service", EngineService(worker).for_node("here"))
    server = Link(far_end, Peer("far", serves_max=8), {("eyes", Encode): guarded})
    async with trio.open_nursery() as nursery:
        for run in (asker.run, server.run, partial(serve, worker.inbox, partial(take_a_while, seconds=seconds))):
            nursery.start_soon(run)
        await asker.wait_ready()
        here.linked("far", asker)
        here.merge_state("far", NodeState((evolve(worker.offer, up=True, engine=EYES),)))
        with worker.engine.publish(cast("Any", EncoderByHand())):
            (remote,) = here.records["far"].workers.values()
            yield remote, far
        nursery.cancel_scope.cancel()


async def ask(worker: RemoteWorker, request: Encode) -> None:
    try:
        async with worker.ask(request, 0) as answer:
            await answer.result()
    except NotReady:
        pass


# Counts -----------------------------------------------------------------------------------


async def test_an_item_counts_with_its_tokens_while_it_is_encoded_on_both_nodes(autojump_clock: MockClock) -> None:
    async with two_nodes() as (remote, far), trio.open_nursery() as nursery:
        for number, item in enumerate((image("a"), video("b"), image("c"))):
            nursery.start_soon(ask, remote, encode(item, new_id(number)))
        await trio.sleep(2)
        offer, load = far.local["eyes"].offer, remote.load
        assert (offer.running, offer.waiting, offer.tokens) == (2, 1, 4 + 8 + 4)
        assert (load.busy, load.tokens, load.pending, load.own, load.unstarted) == (3, 16, 16, 3, 3)
        assert (load.leg, load.kv_tokens_max, load.pending_max, load.full) == (Leg.ENCODE, 0, 0, True)
        await trio.sleep(10)
        assert (
            remote.in_flight.own.requests,
            remote.in_flight.own.tokens,
            far.running,
            far.local["eyes"].offer.tokens,
        ) == (0, 0, 0, 0)


@pytest.mark.parametrize("halves", range(12))
async def test_leaving_at_any_moment_leaves_no_count_behind(halves: int, autojump_clock: MockClock) -> None:
    async with two_nodes() as (remote, far):
        with trio.move_on_after(halves / 2):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, remote, encode(str(number), new_id(number)))
        await trio.sleep(0.1)
        assert (remote.in_flight.own.requests, remote.load.pending, far.running, far.local["eyes"].offer.tokens) == (
            0,
            0,
            0,
            0,
        )


@asynccontextmanager
async def encoding_node() -> AsyncIterator[tuple[RemoteWorker, Link]]:
    """An encoder that runs on node `far`, as node `here` has it over a link, and that link."""
    here, far, engine = Directory("here"), Directory("far"), noting_encoder()
    worker = add_encoder(far)
    near_end, far_end = sim_pair()
    asker = Link(near_end, Peer("here", serves_max=0))
    guarded = cast("Service", EngineService(worker).for_node("here"))
    server = Link(far_end, Peer("far", serves_max=8), {("eyes", Encode): guarded})
    async with running_encoder(engine), trio.open_nursery() as nursery:
        for run in (asker.run, server.run):
            nursery.start_soon(run)
        await nursery.start(encoder, worker.inbox, engine, 4, EncoderLimits(batch_wait_s=0.5))
        await asker.wait_ready()
        here.linked("far", asker)
        with worker.engine.publish(cast("Any", engine)):
            here.merge_state("far", NodeState((worker.offer,)))
            (remote,) = here.records["far"].workers.values()
            yield remote, asker
        nursery.cancel_scope.cancel()


async def test_a_node_that_leaves_leaves_nothing_of_its_items_behind(autojump_clock: MockClock) -> None:
    async with encoding_node() as (remote, link):
        for tenths in range(0, 20, 2):
            with trio.move_on_after(tenths / 10):
                async with remote.ask(encode(f"left {tenths}", new_id(tenths)), 0) as answer:
                    await answer.result()
            await trio.sleep(3)
            assert (remote.in_flight.own.requests, len(link.peer.asked)) == (0, 0)


# What could harm others ---------------------------------------------------------------------


# Whom nodes hear of ---------------------------------------------------------------------------


def routing_peer(directory: Directory, node: str, *, takes_encoders: bool) -> None:
    directory.linked(node, idle_link())
    directory.merge_state(node, NodeState(routes=True, takes_encoders=takes_encoders))


async def test_an_encoder_is_offered_only_to_nodes_that_take_encoders() -> None:
    directory = Directory("back", routes=False)
    add_encoder(directory)
    for takes_encoders in (False, True):
        routing_peer(directory, f"takes {takes_encoders}", takes_encoders=takes_encoders)
    offered = {node: [offer.name for offer in state_for(directory, node).offers] for node in directory.nodes}
    assert offered == {"takes False": [], "takes True": ["eyes"]}
    assert state_for(directory, "takes True").takes_encoders
    assert state_for(Directory("other"), "any").takes_encoders
    assert directory.state().takes_encoders
    assert [offer.leg for offer in directory.state().offers] == [Leg.ENCODE], "an operator sees all"


# Where they stand in the directory --------------------------------------------------------------


async def test_an_encoder_is_ranked_by_its_own_leg_and_expected_with_it() -> None:
    directory, _ = linked_directory()
    busy = evolve(ENCODER, name="busy", running=3)
    directory.merge_state("far", NodeState((ENGINE, busy, ENCODER)))
    assert [worker.name for worker in directory.ranked("oak", Leg.ENCODE)] == ["eyes", "busy"]
    assert [worker.name for worker in directory.ranked("oak", Leg.BOTH)] == ["one"]
    assert [worker.name for worker in ModelPool(directory, "oak").encoders()] == ["eyes", "busy"]
    assert directory.legs("oak") == {"far/one": Leg.BOTH, "far/busy": Leg.ENCODE, "far/eyes": Leg.ENCODE}


async def test_only_an_encoder_can_do_the_work_of_an_encoder(autojump_clock: MockClock) -> None:
    directory, _ = linked_directory()
    worker, failed = add_encoder(directory), list[type[RequestError]]()

    async def ask_here() -> None:
        try:
            async with worker.ask(encode(), 0) as answer:
                await answer.result()
        except RequestError as error:
            failed.append(type(error))

    async with trio.open_nursery() as nursery:
        directory.merge_state("far", NodeState((ENGINE,)))
        nursery.start_soon(ask_here)
        await wait_all_tasks_blocked()
        assert (failed, worker.inbox.waiting) == ([], (1, 0)), "a whole engine cannot encode for it"
        assert not directory.has_sibling(worker)
        directory.merge_state("far", NodeState((ENGINE, ENCODER)))
        await wait_all_tasks_blocked()
        assert failed == [ActorLost]
        nursery.start_soon(ask_here)
        await wait_all_tasks_blocked()
        assert failed == [ActorLost, NotReady]


async def test_an_encoder_sets_no_limit_of_prompts() -> None:
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState((ENCODER,)))
    assert models.request_tokens_max(directory, "oak") == 0
    directory.merge_state("far", NodeState((ENCODER, ENGINE)))
    assert models.request_tokens_max(directory, "oak") == 64


async def test_no_encoder_is_asked_to_check_a_grammar() -> None:
    directory, _ = linked_directory()
    directory.merge_state("far", NodeState((ENCODER,)))
    with pytest.raises(NotReady, match="no engine of this model is up"):
        await check_grammar(directory, EngineGrammars(run_inline), "oak", Grammar(GrammarKind.REGEX, "a*"), "alice")


# Readiness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "unready", "missing"),
    [
        ((ENGINE, ENCODER), None, None),
        ((ENGINE,), None, None),
        (
            (ENGINE, evolve(ENCODER, up=False, why="failed: the GPU is gone")),
            None,
            "model oak takes no images and videos: engine eyes failed: the GPU is gone",
        ),
        ((ENGINE, evolve(ENCODER, up=False), evolve(ENCODER, name="other")), None, None),
        ((evolve(ENGINE, up=False), ENCODER), "engine one is starting", None),
        ((ENCODER,), "model oak has no engine", None),
    ],
)
async def test_text_is_served_without_encoders_and_what_is_missing_is_said(
    offers: tuple[Offer, ...], unready: str | None, missing: str | None
) -> None:
    directory = Directory("front")
    directory.linked("far", idle_link())
    directory.merge_state("far", NodeState(offers))
    assert readiness.unready(directory, ["oak"]) == unready
    assert readiness.without_encoders(directory, ["oak"]) == missing


async def test_a_model_has_been_ready_although_its_encoder_never_was() -> None:
    directory = Directory("front")
    directory.configure("far", None, [evolve(ENCODER, up=False, engine=None), evolve(ENGINE, up=False, engine=None)])
    assert readiness.never_ready(directory, ["oak"]) == "engine one is still starting"
    directory.linked("far", idle_link())
    directory.merge_state("far", NodeState((ENGINE, evolve(ENCODER, up=False, engine=None))))
    assert readiness.never_ready(directory, ["oak"]) is None


Change = Callable[[Directory], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda directory: directory.merge_state("far", NodeState((ENCODER,), draining=True)), "on a node that drains"),
        (lambda directory: unlink(directory, "far"), "on node far, to which there is no link"),
    ],
)
async def test_an_encoder_that_cannot_be_asked_is_missing_with_the_reason(change: Change, why: str) -> None:
    directory = Directory("front")
    directory.configure("far", None, [ENCODER])
    directory.linked("far", idle_link())
    directory.linked("near", idle_link())
    directory.merge_state("far", NodeState((ENCODER,)))
    directory.merge_state("near", NodeState((ENGINE,)))
    change(directory)
    assert readiness.unready(directory, ["oak"]) is None
    missing = f"model oak takes no images and videos: engine eyes is {why}"
    assert readiness.without_encoders(directory, ["oak"]) == missing
