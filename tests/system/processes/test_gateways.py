"""Two gateway processes behind one port, run by one launcher: one dies, or all are restarted, and clients are served."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from bench.faults.rolling import Load
from bench.rig import checked_clients
from bench.rig.checked_clients import GatewayInterruptions
from bench.rig.node import MODEL, ROOT, Node, free_ports, short_folder, wait_until
from tests.rig.launched import (
    SIMULATED,
    check_exit,
    events_logged,
    nodes,
    run_cli,
    run_supervisor,
    running_launcher,
    seen,
    wait_ready,
)

pytestmark = pytest.mark.realtime

WITHIN_S = 90.0
FRONTS = ["front-0", "front-1"]
CONNECTIONS = 200
CLIENTS = 8


Gateways = tuple[Node, list[int]]  # a launcher, and the ports for metrics of its gateways


@contextmanager
def two_gateways(folder: Path) -> Iterator[Gateways]:
    """Run a launcher of two gateways that share a port and two workers; yields the ports for metrics as well."""
    ports = free_ports(3)
    metrics = next(port for port in free_ports(20) if not {port, port + 1, port + 2} & {*ports})
    text = SIMULATED.format(ports=ports, tiny=ROOT / "examples" / "tiny")
    text = text.replace("[node.front]", f'[node.front]\nmetrics = "127.0.0.1:{metrics}"\ndrain_s = 60')
    text = text.replace('node = "front"\nport', 'node = "front"\nprocesses = 2\nport')
    with running_launcher(folder, text, ports[0]) as target:
        wait_ready(target)
        assert wait_until(lambda: all(answers(port) for port in (metrics, metrics + 1)), WITHIN_S) is not None
        target.living()
        yield target, [metrics, metrics + 1]


@pytest.fixture(scope="module")
def gateways() -> Iterator[Gateways]:
    """Two gateways for all tests of this file; each but the last leaves them ready."""
    with short_folder() as folder, two_gateways(folder) as running:
        yield running


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WITHIN_S) as response:
        text: str = response.read().decode()
        return text


def answers(port: int) -> bool:
    """Whether a gateway is ready, by its port for metrics."""
    try:
        return get(port, "/ready") == "ready\n"
    except OSError:
        return False


def asked(target: Node) -> int:
    """Request one token over a connection of its own; return the status, 0 without an answer."""
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        body = json.dumps({"model": MODEL, "prompt": "The oak", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", "connection": "close"})
        return connection.getresponse().status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


def served(port: int) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in get(port, "/metrics").splitlines()
        if line.startswith("espalier_requests_total{")
    )


@pytest.mark.nightly
def test_the_kernel_divides_connections_between_two_gateways(gateways: Gateways) -> None:
    target, metrics = gateways
    assert list(nodes(target)) == [*FRONTS, "one", "two"]
    assert [asked(target) for _ in range(CONNECTIONS)] == [200] * CONNECTIONS
    counts = [served(port) for port in metrics]
    assert sum(counts) == CONNECTIONS
    assert min(counts) >= 0.35 * CONNECTIONS, counts
    statuses = seen(target)
    assert [statuses[name]["gate"]["running_max"] for name in FRONTS] == [256, 256]
    assert len(events_logged(target, "starting")) == 5  # the launcher and its nodes
    again = run_supervisor(target.folder / "cluster.toml")
    assert (again.returncode, "cannot be had" in again.stderr) == (1, True), "a second launcher would share the port"


def test_when_one_gateway_is_killed_the_other_serves_until_it_is_back(gateways: Gateways) -> None:
    target, metrics = gateways
    os.kill(nodes(target)["front-0"].pid, SIGKILL)
    assert wait_until(lambda: len(events_logged(target, "node front-0 ended")) or not answers(metrics[0]), WITHIN_S)
    statuses = [asked(target) for _ in range(50)]
    assert statuses.count(200) >= 49, "only a connection of the moment of its death may be lost"
    assert wait_until(lambda: answers(metrics[0]), WITHIN_S) is not None
    before = served(metrics[0])
    assert [asked(target) for _ in range(50)] == [200] * 50
    assert served(metrics[0]) > before
    assert seen(target)["front-0"]["tree"][0]["restarts"] == 1


@pytest.mark.nightly
def test_gateways_are_restarted_under_load_and_no_request_fails(gateways: Gateways) -> None:
    target, _ = gateways
    load, right = Load(), checked_clients.references(target.port)
    before = {name: entry.pid for name, entry in nodes(target).items()}
    with checked_clients.running(load, target.port, right, CLIENTS, 1, GatewayInterruptions, leave_share=0.0):
        code, output = run_cli(target, "restart", "front", temporary=target.tmp)
    assert code == 0, output
    assert [f"Node {name} is up." in output for name in FRONTS] == [True, True]
    after = {name: entry.pid for name, entry in nodes(target).items()}
    assert {name for name in after if after[name] != before[name]} == {*FRONTS}
    assert not load.bad
    refusals = [line for line in target.output().splitlines() if "raining" in line]
    assert (load.failed, load.refused, load.spoilt) == (0, 0, 0), "\n".join([*load.lines(), *refusals])
    assert load.counts["whole"] == load.requests > CLIENTS


@pytest.mark.nightly
def test_a_drain_of_the_name_in_the_file_ends_all_processes_of_a_gateway(gateways: Gateways) -> None:
    target, _ = gateways
    code, output = run_cli(target, "drain", "front", temporary=target.tmp)
    assert (code, [f"Node {name} has gone." in output for name in FRONTS]) == (0, [True, True]), output
    assert list(nodes(target)) == ["one", "two"]
    assert asked(target) == 0
    target.signal(SIGTERM)
    check_exit(target)


@pytest.mark.nightly
def test_a_reload_starts_another_process_at_the_shared_port(folder: Path) -> None:
    with two_gateways(folder) as (target, metrics):
        file = target.folder / "cluster.toml"
        file.write_text(file.read_text().replace("processes = 2", "processes = 3"))
        code, output = run_cli(target, "reload", temporary=target.tmp)
        assert (code, "front-2: it runs now" in output) == (0, True), output
        assert "node front-2 is known now, and the launcher here starts it" in output
        assert wait_until(lambda: answers(metrics[1] + 1), WITHIN_S) is not None
        assert [asked(target) for _ in range(100)] == [200] * 100
        assert min(served(port) for port in (*metrics, metrics[1] + 1)) > 0
        target.signal(SIGTERM)
        check_exit(target)
