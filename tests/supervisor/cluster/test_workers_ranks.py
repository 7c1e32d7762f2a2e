"""Ranks of an engine on another node: each is a worker with a load of its own, and the engine is asked by its name."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.link.peer import Peer
from protocol.messages.cluster import (
    Leg,
    NodeState,
    Offer,
    rank_name,
)
from protocol.messages.engine import EngineLoad, RankLoad
from protocol.messages.generation import Generate
from supervisor.cluster.announcements import state_for
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.work import request_inbox
from supervisor.links.link import Link
from supervisor.links.serving import Service, Services
from supervisor.supervision.registration import Registration
from tests.rig.calls import AnyAnswer, AnyCall
from tests.rig.fake_engine import generate
from tests.rig.gateway import INFO
from tests.rig.links import idle_link, serve
from tests.system.simulator import sim_pair

TWO = evolve(INFO, ranks=2, data_parallel=2, hand_off_address=b"h")


class Engine:
    """An engine that is nothing but its limits."""

    info = TWO


def add_ranks(directory: Directory, ranks: int = 2, leg: Leg = Leg.BOTH) -> list[LocalWorker]:
    """Give a node an engine with so many ranks, which is up."""
    address, inbox = request_inbox(64, lambda request: request.rank)
    registration: Registration[Any] = Registration(directory.notify, last=Engine(), current=Engine())
    workers = [
        LocalWorker(
            node=directory.name,
            idle_offer=Offer(rank_name("e", rank, ranks), "oak", leg, 2, up=False),
            address=address,
            engine=registration,
            inbox=inbox,
            directory=directory,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    directory.local.update({worker.name: worker for worker in workers})
    return workers


async def test_a_rank_of_another_node_is_asked_by_its_engines_name_and_its_number(autojump_clock: MockClock) -> None:
    front, back, asked = Directory("front"), Directory("back", routes=False), list[int]()
    first, second = add_ranks(back)

    async def answer(call: AnyCall, _: AnyAnswer) -> None:
        asked.append(call.request.rank)
        await trio.sleep_forever()

    near, far = sim_pair()
    asker = Link(near, Peer("front", serves_max=0))
    services: Services = {("e", Generate): cast("Service", EngineService(first, front.name, (second,)))}
    async with trio.open_nursery() as nursery:
        for run in (
            asker.run,
            Link(far, Peer("back", serves_max=64), services).run,
            partial(serve, first.inbox, answer),
        ):
            nursery.start_soon(run)
        await asker.wait_ready()
        front.linked("back", asker)
        front.merge_state("back", NodeState((first.offer, second.offer)))
        workers = {worker.full_name: worker for worker in front.workers("oak")}
        assert workers.keys() == {"back/e#0", "back/e#1"}

        async def ask(name: str, number: int) -> None:
            async with workers[name].ask(generate(f"{number:032x}", tokens_max=3), 3) as answer:
                await answer.result()

        for number, name in enumerate(["back/e#1", "back/e#1", "back/e#0"]):
            nursery.start_soon(ask, name, number)
        await trio.sleep(0.5)
        assert sorted(asked) == [0, 1, 1]
        assert {name: worker.load.busy for name, worker in workers.items()} == {"back/e#0": 1, "back/e#1": 2}
        assert {name: worker.in_flight.requests for name, worker in back.local.items()} == {"e#0": 1, "e#1": 2}
        nursery.cancel_scope.cancel()


async def test_ranks_are_offered_only_to_nodes_that_take_them() -> None:
    directory = Directory("back", routes=False)
    add_ranks(directory)
    for takes in (False, True):
        directory.linked(f"takes {takes}", idle_link())
        directory.merge_state(f"takes {takes}", NodeState(routes=True, takes_ranks=takes))
    offered = {node: [offer.name for offer in state_for(directory, node).offers] for node in directory.nodes}
    assert offered == {"takes False": [], "takes True": ["e#0", "e#1"]}
    assert directory.state().takes_ranks
    assert state_for(Directory("other"), "any").takes_ranks


def test_the_ranks_of_one_engine_are_no_siblings_of_each_other() -> None:
    directory = Directory("here")
    first, _ = add_ranks(directory)
    assert not directory.has_sibling(first)
    other: Registration[Any] = Registration(last=Engine(), current=Engine())
    directory.local["f"] = LocalWorker(
        node="here",
        idle_offer=Offer("f", "oak", Leg.BOTH, 2, up=True),
        address=first.address,
        engine=other,
        inbox=first.inbox,
        directory=directory,
    )
    directory.notify()
    assert directory.has_sibling(first)


async def test_an_engine_is_idle_when_all_of_its_ranks_are(autojump_clock: MockClock) -> None:
    directory = Directory("here")
    _, second = add_ranks(directory)
    with trio.CancelScope() as asking:
        async with second.ask(generate("a", tokens_max=3), 3):
            with trio.move_on_after(1) as waiting:
                await directory.wait_worker_idle("e")
            assert waiting.cancelled_caught
            asking.cancel()
    with trio.fail_after(1):
        await directory.wait_worker_idle("e")


def test_the_load_of_an_engine_is_the_sum_of_its_ranks() -> None:
    one, other = (
        RankLoad(running=each, waiting=2 * each, kv_tokens_used=3 * each, kv_tokens_max=99) for each in (1, 10)
    )
    assert EngineLoad.of_ranks([one]).totals == EngineLoad(1, 2, 3)
    both = EngineLoad.of_ranks([one, other])
    assert both == both.totals == EngineLoad(11, 22, 33, (one, other))
