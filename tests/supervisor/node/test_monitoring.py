"""A node without a gateway serves its metrics and probes at an endpoint of its own."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve

from protocol.errors import StartFailed
from supervisor.cluster.directory import Directory
from supervisor.gateway.http.routes import ROUTES
from supervisor.gateway.keys import client_keys
from supervisor.gateway.keys.key_sources import ADMIN
from supervisor.gateway.server import serve
from supervisor.links.endpoint import Endpoint
from supervisor.node import monitoring, preview
from supervisor.node.assembly import Assembly
from supervisor.node.credentials import read_credentials
from tests.rig.assembly import built_assembly
from tests.rig.fake_engine import Costs, FakeEngine
from tests.rig.links import idle_link
from tests.supervisor.telemetry.test_metrics import cluster


@asynccontextmanager
async def monitored(folder: Path, environment: dict[Any, Any]) -> AsyncIterator[Assembly]:
    """Run the monitoring endpoint of node back on loopback, and nothing else of the node."""
    configuration = cluster(folder)
    assembly, _ = built_assembly(configuration, "back", read_credentials(configuration, "back", environment))
    assert assembly.monitoring is not None
    runtime = evolve(assembly.monitoring.runtime, new_id=lambda: "ab" * 16)  # traces take no others
    assembly.monitoring.runtime = runtime
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, assembly.monitoring, ROUTES.probes(), "127.0.0.1", 0)
        yield assembly
        nursery.cancel_scope.cancel()


async def get(assembly: Assembly, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    assert assembly.monitoring is not None
    url = f"http://127.0.0.1:{assembly.monitoring.port.number}{path}"
    request = urllib.request.Request(url, headers=headers, method=method)

    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await trio.to_thread.run_sync(ask)


async def test_a_monitoring_endpoint_serves_metrics_and_probes_and_nothing_else(tmp_path: Path) -> None:
    async with monitored(tmp_path, {}) as assembly:
        assert await get(assembly, "/health") == (200, "alive\n")
        status, text = await get(assembly, "/metrics")
        assert (status, 'espalier_engine_up{engine="back/tiny-0"} 0.0' in text) == (200, True)
        for path, method in (
            ("/v1/models", "GET"),
            ("/v1/chat/completions", "POST"),
            ("/flush_cache", "POST"),
            ("/server_info", "GET"),
            ("/openapi.json", "GET"),
        ):
            assert (await get(assembly, path, method))[0] == 404
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        assert (await get(assembly, "/v1/responses", **upgrade, **{"Sec-WebSocket-Key": "a" * 22 + "=="}))[0] == 404
        for path in ("/health", "/metrics"):
            assert (await get(assembly, path, Host="10.0.3.7:7500"))[0] == 200


async def test_a_node_is_ready_when_its_engines_are_up_and_it_has_a_link_to_the_gateways_node(tmp_path: Path) -> None:
    async with monitored(tmp_path, {}) as assembly:

        async def why() -> str:
            status, text = await get(assembly, "/ready")
            return text if status == 503 else str(status)

        assert "engine tiny-0 is starting" in await why()
        with assembly.engines["tiny-0"].publish(FakeEngine(Costs())):
            assert "there is no link to node front" in await why()
            assembly.directory.linked("front", idle_link())
            assert await why() == "200"
            assembly.directory.drain()
            assert "the node drains" in await why()


async def test_metrics_require_an_admin_key_if_there_is_one_and_probes_do_not(tmp_path: Path) -> None:
    async with monitored(tmp_path, {ADMIN: "quetzalcoatl"}) as assembly:
        assert (await get(assembly, "/health"))[0] == 200
        assert (await get(assembly, "/ready"))[0] == 503
        assert (await get(assembly, "/metrics"))[0] == 401
        assert (await get(assembly, "/metrics", Authorization="Bearer wrong"))[0] == 401
        assert (await get(assembly, "/metrics", Authorization="Bearer quetzalcoatl"))[0] == 200


def test_a_monitoring_endpoint_beyond_loopback_requires_an_admin_key(tmp_path: Path) -> None:
    configuration = cluster(tmp_path, "0.0.0.0:7500")
    with pytest.raises(StartFailed, match=r"^0.0.0.0:7500 is not loopback"):
        client_keys.metrics_keys(configuration, "back", {})
    with pytest.raises(StartFailed, match=r"^0.0.0.0:7500 is not loopback"):
        preview.describe_node(configuration, "back", {})
    assert client_keys.metrics_keys(configuration, "back", {ADMIN: "quetzalcoatl"}).names(admin=True) == ["admin"]
    assert client_keys.metrics_keys(configuration, "front", {}).names(admin=True) == []


async def test_a_worker_is_ready_while_any_gateway_is_linked(tmp_path: Path) -> None:
    configuration = cluster(tmp_path)
    gateway = evolve(configuration.gateway, nodes=("front-0", "front-1"))
    configuration, directory = evolve(configuration, gateway=gateway), Directory("back")
    assert monitoring.unready(configuration, directory) == "there is no link to nodes front-0, front-1"
    directory.linked("front-1", idle_link())
    assert monitoring.unready(configuration, directory) is None


async def test_the_monitoring_endpoint_of_a_gateway_is_not_ready_while_its_node_drains(tmp_path: Path) -> None:
    configuration = cluster(tmp_path)
    node = evolve(configuration.node["front"], metrics=Endpoint("127.0.0.1", 7500))
    configuration = evolve(configuration, node={**configuration.node, "front": node})
    assembly, _ = built_assembly(configuration, "front")
    assert assembly.monitoring is not None
    assert assembly.gateway is not None
    assembly.gateway.probes = evolve(assembly.gateway.probes, unready=lambda: None)
    await trio.lowlevel.checkpoint()
    unready = partial(monitoring.gateway_unready, assembly.directory, assembly.gateway)
    assert unready() is None
    assembly.directory.drain()
    assert assembly.monitoring.probes.unready() == unready() == "the node drains"
