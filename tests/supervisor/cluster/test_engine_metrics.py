"""The metrics of engines, as the metrics of nodes have them: of all that answer in time, and within a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
from attrs import define, evolve
from trio.testing import MockClock

from actors.engines import port
from protocol.errors import EngineLost, RequestError, Unsupported
from protocol.messages.engine import EngineLoad
from protocol.messages.kind import Message
from protocol.messages.operations import EngineMetrics, GetMetrics
from supervisor.cluster import engine_metrics
from supervisor.cluster.directory import Directory
from supervisor.node import monitoring
from supervisor.telemetry import metrics as node_metrics
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.gateway import INFO
from tests.rig.network import SimTransport
from tests.supervisor.cluster import test_engine_control
from tests.supervisor.telemetry.test_metrics import cluster

TEXT = "# HELP sglang:x About\n# TYPE sglang:x gauge\nsglang:x 1.0\n"


@define(eq=False)
class Engine(test_engine_control.Engine):
    """An engine that has metrics, or an error in their place."""

    text: str | RequestError = TEXT
    left_out: int = 0
    asked: int = 0
    info = evolve(INFO, metrics=True)

    async def operate(self, request: Message) -> Message:
        assert request == GetMetrics()
        self.asked += 1
        await trio.sleep(self.takes_s)
        if isinstance(self.text, RequestError):
            raise self.text
        return EngineMetrics(self.text, self.left_out)


@define(eq=False)
class Silent(Engine):
    """An engine of a version, or with a key, by which it has none."""

    info = INFO


@asynccontextmanager
async def front(here: Engine, **there: Engine | None) -> AsyncIterator[tuple[Directory, dict[str, SimTransport]]]:
    async with test_engine_control.front(here, **there) as (directory, transports):
        for name, engine in there.items():
            (worker,) = directory.records[name].workers.values()
            worker.offer = evolve(worker.offer, engine=Engine.info if engine is None else engine.info)
        yield directory, transports


def series(text: bytes) -> list[str]:
    return [line for line in text.decode().splitlines() if line.startswith("sglang:")]


async def test_the_metrics_of_a_gateway_have_those_of_every_engine_of_the_cluster(autojump_clock: MockClock) -> None:
    silent = Silent()
    async with front(Engine(), a=Engine(), b=silent) as (directory, _):
        text = await monitoring.cluster_metrics_text(directory, Metrics())
        assert series(text) == [
            'sglang:x{engine="a/tiny-0",rank="0"} 1.0',
            'sglang:x{engine="main/tiny-0",rank="0"} 1.0',
        ]
        assert text.count(b"# TYPE sglang:x ") == text.count(b"# HELP sglang:x ") == 1
        assert b'espalier_engine_metrics_left_out{engine="a/tiny-0"} 0.0' in text
        assert silent.asked == 0, "a node that does not know the message would end the link"


async def test_an_engine_that_is_stuck_lost_or_cut_off_is_left_out_and_delays_no_other(
    autojump_clock: MockClock,
) -> None:
    far = {"stuck": Engine(takes_s=600), "stopped": Engine(), "lost": Engine(text=EngineLost("")), "cut": Engine()}
    async with front(Engine(), good=Engine(), **far) as (directory, transports), trio.open_nursery() as nursery:
        transports["stopped"].swallow()
        transports["cut"].cut()
        started_at = trio.current_time()
        text = await monitoring.cluster_metrics_text(directory, Metrics())
        assert [line.split('"')[1] for line in series(text)] == ["good/tiny-0", "main/tiny-0"]
        assert b'espalier_engine_running{engine="main/tiny-0"} 1.0' in text
        assert trio.current_time() - started_at == engine_metrics.METRICS_WITHIN_S, "loads are asked for meanwhile"
        nursery.cancel_scope.cancel()


async def test_an_engine_out_of_service_has_its_series(autojump_clock: MockClock) -> None:
    async with front(Engine()) as (directory, _):
        with directory.local["tiny-0"].engine.out_of_service("its weights are replaced"):
            assert len(series(await monitoring.cluster_metrics_text(directory, Metrics()))) == 1


async def test_texts_that_find_no_room_are_counted(autojump_clock: MockClock) -> None:
    long = TEXT + 'sglang:x{a="b"} 1.0\n' * 30
    quick, slow = Engine(text=long), Engine(text=long, left_out=2, takes_s=0.1)
    kept = {"main/tiny-0": EngineMetrics(long), "a/tiny-0": EngineMetrics("", 2 + 33)}
    async with front(quick, a=slow) as (directory, _):
        assert await engine_metrics.cluster_metrics(directory, 2 * len(long) - 1) == kept
        assert len((await engine_metrics.cluster_metrics(directory, 2 * len(long)))["a/tiny-0"].text) == len(long)
    engines = {"main/tiny-0": test_engine_control.registered(quick), "a/tiny-0": test_engine_control.registered(slow)}
    assert await engine_metrics.local_metrics(engines, 2 * len(long) - 1) == kept


async def test_few_scrapes_collect_metrics_at_a_time(autojump_clock: MockClock) -> None:
    here = Engine(takes_s=0.5)
    async with front(here) as (directory, _), trio.open_nursery() as nursery:
        metrics = Metrics()
        for _ in range(node_metrics.SCRAPES_MAX + 1):
            nursery.start_soon(monitoring.cluster_metrics_text, directory, metrics)
        await trio.sleep(0.25)
        assert here.asked == node_metrics.SCRAPES_MAX
    assert here.asked == node_metrics.SCRAPES_MAX + 1


async def test_a_node_serves_the_metrics_of_its_engines_and_has_them_in_its_own(tmp_path: Path) -> None:
    assembly, _ = built_assembly(cluster(tmp_path), "back")
    assert assembly.monitoring is not None
    assert assembly.links is not None
    assert series(await assembly.monitoring.probes.metrics_text()) == []
    service = assembly.links.services["tiny-0", GetMetrics]
    engine = Engine(EngineLoad(0, 0, 0))
    with assembly.engines["tiny-0"].publish(cast("port.Engine", engine)):
        assert series(await assembly.monitoring.probes.metrics_text()) == [
            'sglang:x{engine="back/tiny-0",rank="0"} 1.0'
        ]
        async with service.ask(GetMetrics(), 0) as answer:
            assert await answer.result() == EngineMetrics(TEXT)
        engine.text = Unsupported("none")
        async with service.ask(GetMetrics(), 0) as answer:
            with pytest.raises(Unsupported):
                await answer.result()
    assert series(await assembly.monitoring.probes.metrics_text()) == []
