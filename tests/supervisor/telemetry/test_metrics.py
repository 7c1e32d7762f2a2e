"""The metrics of links, calls, resumes and aborts, and the monitoring endpoint that serves them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from actors.decode import decode
from actors.engines.slots import Deadlines, SlotObserver
from actors.kit.priority_inbox import priority_inbox
from actors.routing.ports import RoutingObserver
from protocol.errors import LinkLost, StartFailed
from protocol.messages import EngineLoad
from protocol.peer import Peer
from supervisor.config import load
from supervisor.engines.kinds import read_cluster
from supervisor.gateway import client_keys
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.keys import ADMIN
from supervisor.gateway.server import serve
from supervisor.links.link import Link
from supervisor.node import preview
from supervisor.node.assembly import Assembly
from supervisor.node.credentials import read_credentials
from supervisor.observers import RoutingMetrics, SlotMetrics
from supervisor.telemetry.metrics import Metrics
from tests.rig.assembly import built_assembly
from tests.rig.fake_engine import Costs, FakeEngine, generate
from tests.rig.router import Fake, Play, routed

TINY = Path(__file__).parents[3] / "examples" / "tiny"


def cluster(folder: Path, metrics: str = "127.0.0.1:0") -> load.Cluster:
    file = folder / "cluster.toml"
    file.write_text(f"""
[node.front]
[node.back]
listen = "127.0.0.1:1"
metrics = "{metrics}"
[gateway]
node = "front"
[model.tiny]
path = "{TINY}"
[engine.tiny-0]
node = "back"
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
""")
    return read_cluster(file)


def lines(metrics: Metrics, name: str) -> dict[str, float]:
    """Return the series of a name, with their values."""
    found = (line.rpartition(" ") for line in metrics.render({}).decode().splitlines() if line.startswith(name))
    return {series: float(value) for series, _, value in found}


# Numbers ----------------------------------------------------------------------------------


class Slots(SlotObserver):
    """Remembers how long slots were kept."""

    def __init__(self) -> None:
        self.aborts = []

    def aborted(self, seconds: float) -> None:
        self.aborts.append(seconds)


async def test_the_time_of_an_abort_is_from_the_cancellation_to_the_release_of_the_slot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    observer = Slots()
    engine = FakeEngine(Costs())
    address, inbox = priority_inbox(2, lambda _: 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await nursery.start(decode, inbox, engine, 2, Deadlines(), observer)
        with trio.move_on_after(2.5):
            wanted = generate(tokens_max=100)
            async with address.ask(wanted, 100) as replies:
                await replies.result()
        left_at = trio.current_time()
        await engine.wait_released(wanted.id)
        await trio.testing.wait_all_tasks_blocked()
        assert observer.aborts == [trio.current_time() - left_at]
        nursery.cancel_scope.cancel()


def test_stuck_slots_are_counted_until_the_engine_releases_them() -> None:
    metrics = Metrics()
    observer = SlotMetrics(metrics, "main/tiny-0")
    observer.stuck(2)
    assert lines(metrics, "espalier_engine_slots_stuck") == {'espalier_engine_slots_stuck{engine="main/tiny-0"}': 2.0}
    observer.stuck(0)
    assert lines(metrics, "espalier_engine_slots_stuck") == {'espalier_engine_slots_stuck{engine="main/tiny-0"}': 0.0}


async def test_an_answer_that_ends_and_an_actor_that_is_stopped_are_not_counted_as_aborts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    observer = Slots()
    engine = FakeEngine(Costs())
    address, inbox = priority_inbox(2, lambda _: 0)
    actor = trio.CancelScope()

    async def life(*, task_status) -> None:
        with actor:
            await decode(inbox, engine, 2, Deadlines(), observer, task_status=task_status)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        await nursery.start(life)
        async with address.ask(generate(tokens_max=3), 3) as replies:
            await replies.result()
        async with address.ask(generate("b", tokens_max=9), 9) as replies:
            await trio.sleep(2)
            actor.cancel()
            await replies.over.wait()
        nursery.cancel_scope.cancel()
    assert observer.aborts == []


def test_a_router_counts_how_calls_end_and_why_requests_were_resumed() -> None:
    metrics = Metrics()
    watch = RoutingMetrics(metrics, "tiny")
    watch.call_ended("back/tiny-0", "hand_off_failed")
    watch.call_ended("back/tiny-0", "ended")
    watch.call_resumed("hand_off_failed", 0)
    watch.call_resumed("engine_lost", 7)
    assert lines(metrics, "espalier_worker_calls_total") == {
        'espalier_worker_calls_total{model="tiny",outcome="hand_off_failed",worker="back/tiny-0"}': 1.0,
        'espalier_worker_calls_total{model="tiny",outcome="ended",worker="back/tiny-0"}': 1.0,
    }
    assert lines(metrics, "espalier_resumes_total") == {
        'espalier_resumes_total{code="hand_off_failed",kind="retried",model="tiny"}': 1.0,
        'espalier_resumes_total{code="engine_lost",kind="resumed",model="tiny"}': 1.0,
    }


def test_a_second_definition_of_a_metric_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="the metric espalier_requests is defined twice"):
        metrics.registry.counter("espalier_requests", "Something else", "model")


async def test_each_metric_of_a_node_is_in_its_text_once(tmp_path: Path) -> None:
    for node in ("front", "back"):
        _, metrics = built_assembly(cluster(tmp_path), node)
        lines = metrics.render({"back/tiny-0": EngineLoad(1, 0, 2)}).decode().splitlines()
        names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
        assert sorted(set(names)) == sorted(names)
        assert {"espalier_engine_up", "espalier_engine_running", "espalier_link_up"} <= set(names)


async def test_the_counts_of_a_link_remain_after_it_is_lost(tmp_path: Path) -> None:
    house, metrics = built_assembly(cluster(tmp_path), "front")
    house.links.traffic["back"].received(40)
    assert lines(metrics, 'espalier_link_up{peer="back"}') == {'espalier_link_up{peer="back"}': 0.0}
    house.links.traffic["back"].received(2)
    told = lines(metrics, 'espalier_link_bytes_total{direction="received",peer="back"}')
    assert list(told.values()) == [42.0]
    assert list(lines(metrics, 'espalier_link_messages_total{direction="received"').values()) == [2.0]


# Where they are told ----------------------------------------------------------------------


@asynccontextmanager
async def told(folder: Path, environment) -> AsyncIterator[Assembly]:
    """A back node's own door on loopback; nothing else of the node runs."""
    made = cluster(folder)
    house, _ = built_assembly(made, "back", read_credentials(made, "back", environment))
    house.monitoring.new_id = lambda: "ab" * 16  # traces take no others
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, house.monitoring, ROUTES.probes(), "127.0.0.1", 0)
        yield house
        nursery.cancel_scope.cancel()


async def get(house: Assembly, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{house.monitoring.port}{path}", headers=headers, method=method)

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await trio.to_thread.run_sync(ask)


async def test_a_monitoring_endpoint_serves_metrics_and_probes_and_nothing_else(tmp_path: Path) -> None:
    async with told(tmp_path, {}) as house:
        assert await get(house, "/health") == (200, "alive\n")
        status, text = await get(house, "/metrics")
        assert (status, 'espalier_engine_up{engine="back/tiny-0"} 0.0' in text) == (200, True)
        for path, method in (
            ("/v1/models", "GET"),
            ("/v1/chat/completions", "POST"),
            ("/flush_cache", "POST"),
            ("/server_info", "GET"),
            ("/openapi.json", "GET"),
        ):
            assert (await get(house, path, method))[0] == 404
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        assert (await get(house, "/v1/responses", **upgrade, **{"Sec-WebSocket-Key": "a" * 22 + "=="}))[0] == 404
        assert (await get(house, "/metrics", Host="evil.example"))[0] == 403


async def test_a_node_is_ready_when_its_engines_are_up_and_it_has_a_link_to_the_gateways_node(tmp_path: Path) -> None:
    async with told(tmp_path, {}) as house:

        async def why() -> str:
            status, text = await get(house, "/ready")
            return text if status == 503 else str(status)

        assert "engine tiny-0 is starting" in await why()
        with house.directory.local["tiny-0"].engine.publish(FakeEngine(Costs())):
            assert "there is no link to node front" in await why()
            house.directory.linked("front", Link(None, Peer("back", serves_max=1)))
            assert await why() == "200"
            house.directory.drain()
            assert "the node drains" in await why()


async def test_metrics_require_an_admin_key_if_there_is_one_and_probes_do_not(tmp_path: Path) -> None:
    async with told(tmp_path, {ADMIN: "quetzalcoatl"}) as house:
        assert (await get(house, "/health"))[0] == 200
        assert (await get(house, "/ready"))[0] == 503
        assert (await get(house, "/metrics"))[0] == 401
        assert (await get(house, "/metrics", Authorization="Bearer wrong"))[0] == 401
        assert (await get(house, "/metrics", Authorization="Bearer quetzalcoatl"))[0] == 200


def test_a_monitoring_endpoint_beyond_loopback_requires_an_admin_key(tmp_path: Path) -> None:
    made = cluster(tmp_path, "0.0.0.0:7500")
    with pytest.raises(StartFailed, match=r"node.back.metrics 0.0.0.0:7500 is not loopback"):
        client_keys.metrics_keys(made, "back", {})
    with pytest.raises(StartFailed, match=r"node.back.metrics 0.0.0.0:7500 is not loopback"):
        preview.describe_node(made, "back", {})
    assert client_keys.metrics_keys(made, "back", {ADMIN: "quetzalcoatl"}).names(admin=True) == ["admin"]
    assert client_keys.metrics_keys(made, "front", {}).names(admin=True) == []


def test_a_monitoring_endpoint_must_not_collide_with_another_listener_of_its_host(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"line 5: node.back.metrics: is where node back listens"):
        cluster(tmp_path, "127.0.0.1:1")
    with pytest.raises(StartFailed, match=r"node.back.metrics: is where the gateway is"):
        cluster(tmp_path, "127.0.0.1:8000")


def test_the_monitoring_endpoint_starts_first_and_stops_last(tmp_path: Path) -> None:
    house, _ = built_assembly(cluster(tmp_path), "back")
    assert house.tree.children[0].name == "metrics"
    assert {operation.path for operation in house.tree.children[0].args[1].operations} == {
        "/health",
        "/ready",
        "/metrics",
    }
    assert built_assembly(cluster(tmp_path), "front")[0].monitoring is None


async def test_a_resumed_request_is_counted_once_and_each_call_by_its_outcome(
    autojump_clock: trio.testing.MockClock,
) -> None:
    heard: list[tuple] = []

    class Hears(RoutingObserver):
        def call_ended(self, worker: str, outcome: str) -> None:
            heard.append((worker, outcome))

        def call_resumed(self, code: str, sent: int) -> None:
            heard.append((code, sent))

    bad, good = Fake("bad", [Play(LinkLost("gone"), tokens=2)]), Fake("good", more=1)
    async with routed(bad, good) as world:
        world.routing.observer = Hears()
        async with world.address.ask(generate(tokens_max=4), 4) as replies:
            await replies.result()
        with trio.move_on_after(1.5):
            async with world.address.ask(generate("b", tokens_max=4), 4) as replies:
                await replies.result()
        await trio.testing.wait_all_tasks_blocked()
    assert heard[:3] == [("bad", "link_lost"), ("link_lost", 2), ("good", "ended")]
    assert [outcome for _, outcome in heard[3:]] == ["left"]
