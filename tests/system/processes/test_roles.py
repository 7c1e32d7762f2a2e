"""Roles of engines in a cluster of processes: by the command line and over HTTP, under requests; a node's restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Event
from typing import Any

import pytest

from bench.rig.node import MODEL, ROOT, Node, free_ports, short_folder, wait_until
from tests.rig.launched import run_cli, running_launcher, wait_ready

pytestmark = pytest.mark.realtime

FILE = """
[node.front]
[gateway]
node = "front"
port = {ports[0]}
[cluster]
silent_s = 8.0
[model.tiny]
path = "{tiny}"
"""
ENGINE = """
[node.{node}]
listen = "127.0.0.1:{port}"
[engine.{name}]
node = "{node}"
model = "tiny"
kind = "simulated"
leg = "{leg}"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.01
"""
ENGINES = {"p": "prefill", "d": "decode", "x": "decode"}
CLIENTS, WORDS = 6, 5
WITHIN_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Node]:
    ports = free_ports(1 + len(ENGINES))
    text = FILE.format(ports=ports, tiny=ROOT / "examples" / MODEL)
    for port, (name, leg) in zip(ports[1:], ENGINES.items(), strict=True):
        text += ENGINE.format(node=f"node-{name}", port=port, name=name, leg=leg)
    with short_folder() as folder, running_launcher(folder, text, ports[0]) as target:
        wait_ready(target)
        yield target


def post(target: Node, path: str, **body: Any) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def complete(target: Node, number: int) -> str:
    """Return the text of an answer; a request that fails is an error of the test."""
    prompt = f"The oak {number % WORDS}"
    status, body = post(
        target, "/v1/completions", model=MODEL, prompt=prompt, max_tokens=20, ignore_eos=True, temperature=0
    )
    assert status == 200, body
    return str(body["choices"][0]["text"])


@contextmanager
def under_requests(target: Node) -> Iterator[list[str]]:
    """Ask without a pause while the body runs, and check each answer."""
    wanted = [complete(target, number) for number in range(WORDS)]
    assert len(set(wanted)) > 1
    over, answers = Event(), list[str]()

    def client(number: int) -> None:
        while not over.is_set():
            answers.append(complete(target, number))
            assert answers[-1] == wanted[number % WORDS]
            number += 1

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(client, number) for number in range(CLIENTS)]
        try:
            yield answers
        finally:
            over.set()
        for each in clients:
            each.result()


def legs(target: Node) -> dict[str, tuple[str, bool]]:
    """Return the leg of each engine in the announcements of its node, and whether it is up."""
    _, output = run_cli(target, "status", "--json")
    nodes = json.loads(output)["nodes"].values()
    offers = [offer for node in nodes for offer in node.get("state", {}).get("offers", ())]
    return {offer["name"]: (offer["leg"], offer["up"]) for offer in offers}


@pytest.mark.nightly
def test_an_engine_changes_its_role_and_back_and_no_request_is_lost(cluster: Node) -> None:
    with under_requests(cluster) as answers:
        for role in ("prefill", "both"):
            before = len(answers)
            code, output = run_cli(cluster, "engine", "x", "set-role", "--role", role)
            assert (code, output.strip()) == (0, "node-x/x was given the role")
            assert legs(cluster) == {"p": ("prefill", True), "d": ("decode", True), "x": (role, True)}
            assert len(answers) > before
        assert post(cluster, "/set_role?engine=x", role="decode", running="end") == (200, {"node-x/x": {}})
        assert legs(cluster)["x"] == ("decode", True)
    code, output = run_cli(cluster, "engine", "p", "set-role", "--role", "decode")
    assert (code, output.strip()) == (
        1,
        "node-p/p was not given the role: no engine in service would be left for prompts of its model",
    )
    status, body = post(cluster, "/set_role?engine=p", role="decode")
    assert (status, "would be left for prompts" in body["error"]["message"]) == (400, True)
    status, body = post(cluster, "/set_role?engine=p", role="neither")
    assert (status, body["error"]["param"]) == (400, "role")
    status, body = post(cluster, "/set_role", role="both")
    assert (status, body["error"]["param"]) == (400, "engine")


@pytest.mark.nightly
def test_a_node_that_starts_again_has_the_roles_of_its_file(cluster: Node) -> None:
    assert run_cli(cluster, "engine", "x", "set-role", "--role", "prefill")[0] == 0
    assert run_cli(cluster, "restart", "node-x")[0] == 0
    assert wait_until(lambda: legs(cluster).get("x") == ("decode", True), WITHIN_S) is not None
