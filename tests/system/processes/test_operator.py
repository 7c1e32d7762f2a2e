"""The commands `status`, `reload` and `drain` on two running nodes, directly and through each other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from subprocess import Popen
from typing import Any
from urllib.request import urlopen

import pytest

from bench.rig.node import MODEL, ROOT, free_port, metric, short_folder, start_process, wait_until
from tests.rig.launched import run_cli

pytestmark = pytest.mark.realtime

WITHIN_S = 90.0
ENGINE = """
[engine.{model}-{number}]
node = "{node}"
model = "{model}"
kind = "simulated"
kv_tokens_max = 65536
[engine.{model}-{number}.simulated.costs]
fixed_s = 0.02
"""
CLUSTER = """
[node.front]
[node.back]
listen = "127.0.0.1:{listen}"
[cluster]
name = "proving"
secret = "secret"
silent_s = 8.0
[gateway]
node = "front"
port = {port}
[model.{model}]
path = "{path}"
"""


class Running:
    """A cluster's file, and its nodes that were started."""

    def __init__(self, folder: Path, stack: ExitStack[bool | None]) -> None:
        self.folder, self.stack, self.port = folder, stack, free_port()
        (folder / "secret").write_text("a-secret-that-nobody-guesses")
        self.file = folder / "cluster.toml"
        text = CLUSTER.format(listen=free_port(), port=self.port, model=MODEL, path=ROOT / "examples" / MODEL)
        engines = (
            ENGINE.format(model=MODEL, number=number, node=node) for number, node in enumerate(("front", "back"))
        )
        self.text = text + "".join(engines)
        self.file.write_text(self.text)

    def start(self, name: str) -> Popen[bytes]:
        output = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = start_process([str(self.file), "--node", name], output, {})
        self.stack.callback(end, process)
        return process

    def seen(self) -> tuple[int, Any]:
        code, output = self.from_elsewhere("status", "--json")
        status = json.loads(output)
        assert status["cluster"] == "proving"
        return code, status["nodes"]

    def from_elsewhere(self, *arguments: str) -> tuple[int, str]:
        """Operate as from another host: by what listens alone."""
        return run_cli(self, *arguments, temporary=self.folder)

    def wait_whole(self) -> None:
        self.wait_ready("front", "back")
        assert wait_until(self.whole, WITHIN_S, every_s=0.2) is not None, self.logs()

    def wait_ready(self, *names: str) -> None:
        """Wait until nodes have logged that they are ready, since a command for each look takes the time of a start."""
        logs = [self.folder / f"{name}.log" for name in names]
        assert wait_until(lambda: all("Ready: " in log.read_text() for log in logs), WITHIN_S) is not None, self.logs()

    def whole(self) -> bool:
        code, nodes = self.seen()
        return code == 0 and all(
            node["tree"][0]["state"] == "up" and all(link["up"] for link in node["links"]) for node in nodes.values()
        )

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def ask(self, tokens: int) -> tuple[Any, Any]:
        """Return how many tokens one answer has and how it ended."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WITHIN_S)
        try:
            body = {"model": MODEL, "prompt": "The oak", "max_tokens": tokens, "ignore_eos": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
        finally:
            connection.close()


def end(process: Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.fixture
def running() -> Iterator[Running]:
    with cluster() as running_cluster:
        yield running_cluster


@contextmanager
def cluster() -> Iterator[Running]:
    with short_folder() as folder, ExitStack() as stack:
        yield Running(folder, stack)


@pytest.mark.nightly
def test_an_operator_reads_the_status_of_a_running_cluster_reloads_and_drains_it(running: Running) -> None:
    front, back = running.start("front"), running.start("back")
    running.wait_whole()

    _, nodes = running.seen()
    assert [child["path"] for child in nodes["back"]["tree"]] == [
        "back",
        "back/links",
        f"back/{MODEL}-1",
        f"back/{MODEL}-1/engine",
        f"back/{MODEL}-1/decode",
        f"back/{MODEL}-1/canary",
        "back/publishers",
        f"back/publishers/events-{MODEL}-1",
    ]
    assert f"front/processor-{MODEL}" in {child["path"] for child in nodes["front"]["tree"]}  # told through `back`
    assert [(link["node"], link["up"]) for link in nodes["front"]["links"]] == [("back", True)]
    assert not any(
        "operator" in neighbour["name"] for node in nodes.values() for neighbour in node["state"]["neighbours"]
    )
    # On a slow machine the warning of a slow turn names a function that serves operators.
    assert not any("operator" in line for line in running.logs().splitlines() if '"awaiting"' not in line)
    code, output = run_cli(running, "status")
    assert (code, f"{MODEL}-1" in output, "2 of 2 nodes answer" in output) == (0, True, True)

    more = running.text.replace('node = "front"\nport', 'node = "front"\nallowed_hosts = ["127.0.0.1", "oak"]\nport')
    running.file.write_text(more + "slots = 3\n")  # which is no cost
    assert run_cli(running, "reload")[0] == 1  # the operator reads the file too
    running.file.write_text(more.replace("[node.back]", "[node.back]\ndrain_s = 15"))
    code, output = run_cli(running, "reload")
    assert code == 0, output
    assert output.splitlines() == [
        "front:",
        "  gateway.allowed_hosts is 127.0.0.1, oak now",
        "back:",
        "  node.back.drain_s is 15 now",
    ]

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(running.ask, 300) for _ in range(8)]
        assert wait_until(lambda: runs_on_back(running), WITHIN_S, every_s=0.05) is not None
        code, output = run_cli(running, "drain", "back")
        assert (code, "Node back has gone." in output) == (0, True), output
        assert back.wait(WITHIN_S) == 0
        assert [answer.result() for answer in answers] == [(300, "length")] * 8
    assert running.ask(3) == (3, "length")

    code, nodes = running.seen()
    assert (code, list(nodes), set(nodes["back"])) == (1, ["front", "back"], {"unreachable"})
    code, output = running.from_elsewhere("drain", "front")
    assert (code, "SIGTERM" in output) == (1, True), output

    again = running.start("back")
    running.wait_whole()
    code, output = running.from_elsewhere("drain", "front")  # through `back`
    assert (code, "Node front has gone." in output) == (0, True), output
    assert front.wait(WITHIN_S) == 0
    assert again.poll() is None


@pytest.mark.nightly
def test_a_node_that_listens_nowhere_is_asked_by_its_socket(running: Running) -> None:
    """Status, reload and drain of the one node of a file without `listen`, and of a file that is broken by now."""
    alone = running.text.replace('node = "back"', 'node = "front"').replace("[node.back]\n", "")
    alone = "".join(line for line in alone.splitlines(keepends=True) if not line.startswith(("listen", "secret")))
    running.file.write_text(alone)
    front = running.start("front")
    running.wait_ready("front")
    code, output = run_cli(running, "status", "--json")
    assert (code, json.loads(output)["nodes"]["front"]["tree"][0]["path"]) == (0, "front")
    code, output = running.from_elsewhere("status")
    assert (code, "none runs here below the temporary folder" in output) == (1, True), output

    running.file.write_text(alone.replace("[node.front]", "[node.front]\ndrain_s = 15"))
    assert run_cli(running, "reload") == (0, "front:\n  node.front.drain_s is 15 now\n")
    for broken in (alone + "slots = 0\n", "[gateway"):  # no mistake keeps a node from reading its keys anew
        running.file.write_text(broken)
        code, output = run_cli(running, "reload")
        assert (code, "front:\n  the file changes nothing: " in output) == (1, True), output
        code, output = run_cli(running, "status")
        assert (code, "nodes that run here are asked all the same" in output, "tiny-0  front" in output) == (
            0,
            True,
            True,
        ), output
        code, output = run_cli(running, "drain", "nobody")
        assert (code, "There is no node nobody; there is front." in output) == (1, True), output
        code, output = running.from_elsewhere("status")
        assert (code, "asked all the same" in output) == (1, False), output
    running.file.write_text(alone)

    twin = running.start("front")  # whose port is taken
    assert twin.wait(WITHIN_S) == 1
    code, output = run_cli(running, "drain", "front")
    assert (code, "Node front has gone." in output) == (0, True), output
    assert front.wait(WITHIN_S) == 0


def runs_on_back(running: Running) -> bool:
    """Whether the engine of `back` has requests, by the front's metrics: a command would take as long as an answer."""
    with urlopen(f"http://127.0.0.1:{running.port}/metrics", timeout=WITHIN_S) as response:
        return metric(response.read().decode(), "espalier_engine_running", engine=f"back/{MODEL}-1") > 0


@pytest.mark.nightly
def test_an_operator_with_another_secret_is_refused_with_the_reason(running: Running) -> None:
    back = running.start("back")
    running.wait_ready("back")
    (running.folder / "secret").write_text("another-secret-that-is-wrong")
    code, output = run_cli(running, "drain", "back")
    assert (code, "it has another secret, or none" in output) == (1, True), output
    assert back.poll() is None
