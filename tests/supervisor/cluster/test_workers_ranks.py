"""Ranks of an engine on another node: each is a worker with a load of its own, and the engine is asked by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.cluster import (
    Leg,
    LoadUpdate,
    NodeState,
    Offer,
    check_loads,
    check_state,
    rank_name,
)
from protocol.messages import EngineLoad, Generate, RankCounts
from protocol.peer import Peer
from supervisor.cluster import engine_control
from supervisor.cluster.announcements import Announcer, state_for
from supervisor.cluster.directory import Directory
from supervisor.cluster.guarded_worker import GuardedWorker
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

TWO = evolve(INFO, ranks=2, data_parallel=2, bootstrap=("h", 1))


class Engine:
    """An engine that is nothing but its limits."""

    info = TWO


def add_ranks(directory: Directory, ranks: int = 2, leg: Leg = Leg.BOTH) -> list[LocalWorker]:
    """Give a node an engine with so many ranks, which is up."""
    address, inbox = request_inbox(64, lambda request: request.rank)
    registration: Registration[Any] = Registration(directory.notify, last=Engine(), current=Engine())
    workers = [
        LocalWorker(
            directory.name,
            Offer(rank_name("e", rank, ranks), "oak", leg, 2, up=False),
            address,
            registration,
            inbox,
            directory,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    directory.local.update({worker.name: worker for worker in workers})
    return workers


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[Directory, Directory, list[int]]]:
    """A node that routes, one with an engine of two ranks, and the ranks that the engine was asked for."""
    front, back = Directory("front"), Directory("back", routes=False)
    near, far = sim_pair()
    asked: list[int] = []
    first, second = add_ranks(back)

    async def answer(call: AnyCall, _: AnyAnswer) -> None:
        asked.append(call.request.rank)
        await trio.sleep_forever()

    def merge(directory: Directory, node: str, message: object) -> None:
        if isinstance(message, LoadUpdate):
            directory.merge_loads(node, check_loads(message))
        else:
            directory.merge_state(node, check_state(cast("NodeState", message)))

    services: Services = {("e", Generate): cast("Service", GuardedWorker(first, front.name, (second,)))}
    ends = (
        (front, back.name, Link(near, Peer("front", serves_max=0))),
        (back, front.name, Link(far, Peer("back", serves_max=64), services)),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, first.inbox, answer)
        for directory, other, link in ends:
            link.on_announcement = partial(merge, directory, other)
            nursery.start_soon(link.run)
        for directory, other, link in ends:
            await link.wait_ready()
            directory.linked(other, link)
            announcer = Announcer(directory)
            announcer.add(other, link)
            nursery.start_soon(announcer.run, lambda: 0.01)
        await trio.sleep(1)
        yield front, back, asked
        nursery.cancel_scope.cancel()


async def test_a_rank_of_another_node_is_asked_by_its_engines_name_and_its_number(autojump_clock: MockClock) -> None:
    async with joined() as (front, back, asked), trio.open_nursery() as nursery:
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
        assert {name: worker.busy for name, worker in back.local.items()} == {"e#0": 1, "e#1": 2}
        nursery.cancel_scope.cancel()


async def test_the_load_of_each_rank_is_announced_by_itself(autojump_clock: MockClock) -> None:
    async with joined() as (front, back, _), trio.open_nursery() as nursery:

        async def ask(worker: LocalWorker, number: int) -> None:
            async with worker.ask(generate(f"{number:032x}", tokens_max=3), 3) as answer:
                await answer.result()

        for number in range(3):
            nursery.start_soon(ask, back.local["e#1"], number)
        await trio.sleep(0.5)
        loads = {worker.full_name: worker.load for worker in front.workers("oak")}
        assert [loads[f"back/e#{rank}"].busy for rank in range(2)] == [0, 3]
        assert loads["back/e#1"].queued > loads["back/e#0"].queued == 0
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
        "here", Offer("f", "oak", Leg.BOTH, 2, up=True), first.address, other, first.inbox, directory
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


async def test_an_engine_is_asked_once_for_its_load_which_is_told_by_rank(autojump_clock: MockClock) -> None:
    directory, asked = Directory("here"), list[object]()
    load = EngineLoad(3, 1, 48, (RankCounts(1, 0, 16), RankCounts(2, 1, 32)))

    class Counting:
        def ask(self, request: object, _: int) -> Any:
            asked.append(request)

            @asynccontextmanager
            async def answered() -> AsyncIterator[Any]:
                class Answer:
                    async def result(self) -> EngineLoad:
                        await trio.lowlevel.checkpoint()
                        return load

                yield Answer()

            return answered()

    for worker in add_ranks(directory):
        worker.services = cast("Any", _Every(Counting()))
    loads = await engine_control.cluster_loads(directory)
    assert loads == {"here/e#0": EngineLoad(1, 0, 16), "here/e#1": EngineLoad(2, 1, 32)}
    assert len(asked) == 1
    load = EngineLoad(3, 0, 3, (RankCounts(1, 0, 1),) * 3)
    assert await engine_control.cluster_loads(directory) == {}, "it has two ranks"


class _Every(dict[object, object]):
    """Services of which each is the same."""

    def __init__(self, service: object) -> None:
        super().__init__()
        self.service = service

    def get(self, *_: object) -> object:
        return self.service


def test_the_load_of_an_engine_is_the_sum_of_its_ranks() -> None:
    assert EngineLoad.of_ranks([EngineLoad(1, 2, 3)]) == EngineLoad(1, 2, 3)
    both = EngineLoad.of_ranks([EngineLoad(1, 2, 3), EngineLoad(10, 20, 30)])
    assert both == EngineLoad(11, 22, 33, (RankCounts(1, 2, 3), RankCounts(10, 20, 30)))
