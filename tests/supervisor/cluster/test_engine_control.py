"""Loads of the engines of all nodes: each has one name, and fails by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
from attrs import define, evolve
from trio.testing import MockClock

from actors.engines import port
from protocol.errors import EngineLost, EngineRenewed, Overloaded, PeerLost
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.engine import Done, EngineLoad, GetLoad
from protocol.messages.kind import Message
from protocol.messages.operations import FlushCache
from supervisor.cluster import engine_control, models, operations, readiness
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.mesh import FORGETS_S
from supervisor.cluster.node_records import FORGET_S
from supervisor.cluster.workers import LocalWorker
from supervisor.config.schema import Cluster
from supervisor.engines.work import request_inbox
from supervisor.links.link import Link
from supervisor.links.serving import Services, under_name
from supervisor.node import monitoring
from supervisor.observers import RoutingMetrics
from supervisor.supervision.registration import Registration
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.gateway import INFO
from tests.rig.network import SimTransport
from tests.rig.nodes import unlink
from tests.supervisor.telemetry.test_metrics import cluster, lines
from tests.system.simulator import sim_pair

OFFER = Offer("tiny-0", "tiny", Leg.BOTH, 4, up=True, engine=INFO)
LOAD = EngineLoad(1, 2, 3)


@define(eq=False)
class Engine:
    """An engine that has a load and a cache, and answers nothing."""

    reports: EngineLoad | Exception = LOAD
    busy: bool = False
    broken: bool = False
    takes_s: float = 0.0
    flushed: int = 0
    info = INFO

    async def load(self) -> EngineLoad:
        await trio.sleep(self.takes_s)
        if isinstance(self.reports, Exception):
            raise self.reports
        return self.reports

    async def operate(self, request: Message) -> Message:
        assert request == FlushCache()
        await trio.sleep(self.takes_s)
        if self.broken:
            raise ZeroDivisionError
        if self.busy:
            raise Overloaded("requests run")
        self.flushed += 1
        return Done()


def registered(engine: Engine | None) -> Registration[Any]:
    """Return a registration of an engine, or of none."""
    return Registration(last=engine, current=engine)


def life_of(engine: Registration[Any], nursery: trio.Nursery) -> Registration[EngineLife]:
    """Return the registration of a life without slots, if there is an engine."""
    if engine.live is None:
        return Registration()
    return Registration(current=EngineLife(engine.live, engine, (), nursery, lambda _: EngineRenewed("it is renewed")))


def services_of(engine: Registration[Any], nursery: trio.Nursery) -> Services:
    """Return the services of the engine `tiny-0`."""
    return operations.engine_services("tiny-0", engine, life_of(engine, nursery))


async def carry(link: Link) -> None:
    with suppress(PeerLost):
        await link.run()


@asynccontextmanager
async def front(
    here: Engine | None, **there: Engine | None
) -> AsyncIterator[tuple[Directory, dict[str, SimTransport]]]:
    """The directory of node `main` with an engine, and links to nodes with one each or none; all have one name."""
    directory = Directory("main")
    transports: dict[str, SimTransport] = {}
    address, inbox = request_inbox(1)
    engine = registered(here)
    async with trio.open_nursery() as nursery:
        directory.local["tiny-0"] = LocalWorker(
            node="main",
            idle_offer=OFFER,
            address=address,
            engine=engine,
            inbox=inbox,
            directory=directory,
            services=under_name("tiny-0", services_of(engine, nursery)),
        )
        for node, far_engine in there.items():
            transports[node], far = sim_pair()
            asker = Link(transports[node], Peer("main", serves_max=0))
            nursery.start_soon(carry, asker)
            nursery.start_soon(
                carry,
                Link(
                    far,
                    Peer(node, serves_max=8),
                    services_of(registered(far_engine), nursery),
                ),
            )
            await asker.wait_ready()
            directory.linked(node, asker)
            directory.merge_state(node, NodeState((evolve(OFFER, up=far_engine is not None),)))
        yield directory, transports
        nursery.cancel_scope.cancel()


# Names ----------------------------------------------------------------------------------------


async def test_workers_of_one_name_on_two_nodes_are_two(autojump_clock: MockClock) -> None:
    async with front(None, a=Engine(), b=Engine()) as (directory, _):
        assert readiness.engines_up(directory) == {"main/tiny-0": 0, "a/tiny-0": 1, "b/tiny-0": 1}
        directory.merge_state("a", NodeState((OFFER,), draining=True))
        assert readiness.unready(directory, ["tiny"]) is None, "the other node serves"
        directory.merge_state("b", NodeState((OFFER,), draining=True))
        assert readiness.unready(directory, ["tiny"]) == "engine main/tiny-0 is starting"
        directory.local.clear()
        assert readiness.unready(directory, ["tiny"]) == "engine a/tiny-0 is on a node that drains"


async def test_o_an_engine_of_a_node_without_a_link_is_not_starting(autojump_clock: MockClock) -> None:
    async with front(None, a=Engine()) as (directory, _):
        directory.local.clear()
        directory.configure("a", None, (OFFER,))
        assert readiness.unready(directory, ["tiny"]) is None
        unlink(directory, "a")
        assert readiness.unready(directory, ["tiny"]) == "engine tiny-0 is on node a, to which there is no link"


async def test_the_server_info_counts_the_engines_of_all_nodes(autojump_clock: MockClock) -> None:
    async with front(Engine(), a=Engine()) as (directory, _):
        info = models.server_info(cast("Cluster", SimpleNamespace(model=["tiny"])), directory, "1")
        assert info["engines"].keys() == {"main/tiny-0", "a/tiny-0"}  # type: ignore[attr-defined]
        assert "hand_off_address" not in info["engines"]["a/tiny-0"]  # type: ignore[index]
        assert info["max_total_num_tokens"] == 2 * INFO.kv_tokens_max


async def test_an_engine_has_one_name_on_every_node(tmp_path: Path) -> None:
    assembly, metrics = built_assembly(cluster(tmp_path), "back")
    assert lines(metrics, "espalier_engine_up") == {'espalier_engine_up{engine="back/tiny-0"}': 0.0}
    assert assembly.monitoring is not None
    assert assembly.links is not None
    with assembly.engines["tiny-0"].publish(cast("port.Engine", Engine())):
        text = (await assembly.monitoring.probes.metrics_text()).decode()
        assert 'espalier_engine_running{engine="back/tiny-0"} 1.0' in text
    assert {("tiny-0", GetLoad), ("tiny-0", FlushCache)} <= assembly.links.services.keys()
    _, metrics = built_assembly(cluster(tmp_path), "front")
    assert lines(metrics, "espalier_engine_up") == {'espalier_engine_up{engine="back/tiny-0"}': 0.0}


# Loads ----------------------------------------------------------------------------------------


async def test_the_metrics_have_the_load_of_every_engine(autojump_clock: MockClock) -> None:
    async with front(Engine(), a=Engine(EngineLoad(4, 5, 6)), b=None) as (directory, _):
        text = (await monitoring.cluster_metrics_text(directory, Metrics())).decode()
        loads = [line for line in text.splitlines() if line.startswith("espalier_engine_kv_tokens_used{")]
        assert loads == [
            'espalier_engine_kv_tokens_used{engine="a/tiny-0"} 6.0',
            'espalier_engine_kv_tokens_used{engine="main/tiny-0"} 3.0',
        ]
        assert trio.current_time() == 0


async def test_an_engine_that_does_not_answer_in_time_is_left_out_and_delays_no_other(
    autojump_clock: MockClock,
) -> None:
    far = {"slow": Engine(takes_s=60), "stopped": Engine(), "cut": Engine(takes_s=0.5), "died": Engine(EngineLost(""))}
    async with front(Engine(), a=Engine(), **far) as (directory, transports), trio.open_nursery() as nursery:
        transports["stopped"].swallow()

        async def cut() -> None:
            await trio.sleep(0.25)
            transports["cut"].cut()

        nursery.start_soon(cut)
        assert await engine_control.cluster_loads(directory) == {"main/tiny-0": LOAD, "a/tiny-0": LOAD}
        assert trio.current_time() == engine_control.LOADS_WITHIN_S


# Calls ----------------------------------------------------------------------------------------


async def counted(directory: Directory, metrics: Metrics) -> dict[Any, Any]:
    """Return the ended calls of each worker, as the metrics have them."""
    metric_lines = (await monitoring.cluster_metrics_text(directory, metrics)).decode().splitlines()
    calls = (
        line.split('worker="')[1].split('"} ')
        for line in metric_lines
        if line.startswith("espalier_worker_calls_total{")
    )
    return {worker: float(count) for worker, count in calls}


async def test_calls_of_a_node_are_counted_on_until_the_node_is_forgotten(autojump_clock: MockClock) -> None:
    metrics, passed_s = Metrics(), 0.0
    watch = RoutingMetrics(metrics, "tiny")
    async with front(None, a=Engine(), b=None, filed=None) as (directory, transports):
        directory.configure("filed", None, [OFFER])
        every = {"main/tiny-0": 1.0, "a/tiny-0": 1.0, "b/tiny-0": 1.0, "filed/tiny-0": 1.0}
        for worker in every:
            watch.call_ended(worker, "ended")
        for node in ("a", "filed"):
            transports[node].cut()
            unlink(directory, node)
        while not (gone := await directory.records.forget()):
            assert await counted(directory, metrics) == every
            await trio.sleep(FORGETS_S)
            passed_s += FORGETS_S
        assert (gone, passed_s) == (["a"], FORGET_S)
        del every["a/tiny-0"]
        assert await counted(directory, metrics) == every, "an engine that is down, and a node of the file, are kept"
        directory.merge_state("a", NodeState((OFFER,)))
        watch.call_ended("a/tiny-0", "ended")
        watch.call_ended("b/tiny-0", "ended")
        assert await counted(directory, metrics) == {**every, "a/tiny-0": 1.0, "b/tiny-0": 2.0}
