"""A cluster to measure: several nodes on this machine, each a process of its own, all of them always ended.

Each node reads a file of its own. All files describe the same cluster but for two things. Each places the gateway on
its own node, so that every node has a window: its `/metrics` tells what its own engines count, read anew at each
scrape. And a file may name another address for a node than the one where it listens: that of a proxy before it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from bench.rig.node import MARK, MODEL, READY_WITHIN_S, ROOT, Node, ProcessEntry, metric, started, wait_until

FRONT = "front"
LOAD_GAUGES = ("running", "waiting", "kv_tokens_used")

FILE = """\
[cluster]
{cluster}
{nodes}
[gateway]
node = "{name}"
port = {port}
{gateway}
[model.{model}]
path = "{path}"
{of_model}
{engines}
"""
NODE = """\
[node.{name}]
drain_s = {drain_s}
logs = "{logs}"
{listen}
"""
ENGINE = """\
[engine.{name}]
node = "{node}"
model = "{model}"
{text}
"""

SIMULATED = """\
kind = "simulated"
slots = {slots}
{leg}
context_max = 8192
kv_tokens_max = 1_000_000
[engine.{name}.simulated]
{simulated}
[engine.{name}.simulated.costs]
{costs}
"""
SGLANG = """\
device = "cpu"
slots = {slots}
{leg}
{bootstrap}
kv_tokens_max = 16384
"""


def free_ports(count: int) -> list[int]:
    """Return so many different ports that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def simulated(
    node: str, leg: str = "both", *, slots: int = 16, costs: Mapping[str, float] | None = None, **more: float
) -> str:
    """Return the section of a simulated engine on a node; `more` is what stands in its table `simulated`."""
    return SIMULATED.format(
        name=node_engine_name(node),
        slots=slots,
        leg=_leg(leg),
        simulated=_lines(more),
        costs=_lines(costs or {}),
    )


def sglang(leg: str = "both", *, slots: int = 16) -> str:
    """Return the section of a real engine on the CPU."""
    bootstrap = f"bootstrap_port = {free_ports(1)[0]}" if leg == "prefill" else ""
    return SGLANG.format(slots=slots, leg=_leg(leg), bootstrap=bootstrap)


def node_engine_name(node: str) -> str:
    """Return the name of a node's one engine."""
    return f"{MODEL}-{node}"


def cluster_engine_name(node: str) -> str:
    """Return the name of a node's one engine in the cluster, where two nodes may have engines of one name."""
    return f"{node}/{node_engine_name(node)}"


def _leg(leg: str) -> str:
    return "" if leg == "both" else f'leg = "{leg}"'


def _lines(values: Mapping[str, float]) -> str:
    return "\n".join(f"{key} = {value}" for key, value in values.items())


@dataclass(frozen=True)
class Plan:
    """The description of a cluster: a front, and a worker node for each engine's section."""

    engines: Mapping[str, str]  # by the node's name
    cluster: str = ""  # lines of their tables
    gateway: str = ""
    model: str = ""
    drain_s: float = 30.0
    front_drain_s: float | None = None  # where it is another

    @property
    def names(self) -> list[str]:
        """Every node, the workers first: whoever dials finds who listens."""
        return [*self.engines, FRONT]


@dataclass
class Cluster:
    """The nodes of one plan as they come and go; a node that is started again has its old ports and folders."""

    plan: Plan
    folder: Path
    windows: dict[str, int] = field(default_factory=dict)  # port of each node's own gateway
    links: dict[str, int] = field(default_factory=dict)  # port where each worker listens for other nodes
    doors: dict[str, int] = field(default_factory=dict)  # port where others look for it, if that is another one
    nodes: dict[str, Node] = field(default_factory=dict)  # the latest of each name
    past: list[Node] = field(default_factory=list)  # those before them

    def __post_init__(self) -> None:
        ports = iter(free_ports(2 * len(self.plan.names)))
        for name in self.plan.names:
            self.windows[name] = next(ports)
            if name != FRONT:
                self.links[name] = next(ports)
            for each in ("t", "logs"):
                (self.folder / name / each).mkdir(parents=True, exist_ok=True)

    @property
    def front(self) -> Node:
        """The node where clients knock."""
        return self.nodes[FRONT]

    @property
    def workers(self) -> list[str]:
        """The names of the nodes that have an engine."""
        return list(self.plan.engines)

    def file(self, name: str) -> str:
        """Return what one node reads."""
        plan, folder = self.plan, self.folder / name
        nodes = []
        for each in plan.names:
            port = self.links.get(each) if each == name else self.doors.get(each, self.links.get(each))
            listen = "" if port is None else f'listen = "127.0.0.1:{port}"'
            drain_s = plan.drain_s if each != FRONT or plan.front_drain_s is None else plan.front_drain_s
            nodes.append(NODE.format(name=each, drain_s=drain_s, logs=folder / "logs", listen=listen))
        engines = [
            ENGINE.format(name=node_engine_name(node), node=node, model=MODEL, text=text)
            for node, text in plan.engines.items()
        ]
        return FILE.format(
            cluster=plan.cluster,
            nodes="".join(nodes),
            name=name,
            port=self.windows[name],
            gateway=plan.gateway if name == FRONT else "",
            model=MODEL,
            path=ROOT / "examples" / MODEL,
            of_model=plan.model,
            engines="".join(engines),
        )

    def start(self, name: str) -> Node:
        """Start a node, without waiting for it.

        To be called by a thread that lives as long as the node is to live: the kernel ends a child with that thread.
        """
        folder = self.folder / name
        cluster, tmp = folder / "cluster.toml", folder / "t"
        cluster.write_text(self.file(name))
        mark = f"{os.getpid()}-{self.windows[name]}-{len(self.nodes) + len(self.past)}"  # of this life alone
        with (folder / "output").open("ab") as output:
            process = started(["--node", name, str(cluster)], output, {"TMPDIR": str(tmp), MARK: mark})
        node = Node(process, self.windows[name], folder, tmp, mark, time.perf_counter())
        if (before := self.nodes.get(name)) is not None:
            node.names |= before.names
            self.past.append(before)
        self.nodes[name] = node
        return node

    def engines_up(self) -> set[str]:
        """Return the workers that the front could ask now."""
        text = self.front.get("/metrics")[1].decode()
        return {each for each in self.workers if metric(text, "espalier_engine_up", engine=cluster_engine_name(each))}

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Return after how long every node was ready and the front could ask every engine; raises if they were not."""

        def ready() -> bool:
            for name, node in self.nodes.items():
                if node.process.poll() is not None:
                    raise RuntimeError(f"node {name} ended:\n{node.output()[-3000:]}")
            if self.front.get("/ready")[0] != 200 or self.engines_up() != set(self.workers):
                return False
            return all(self.counts(name) is not None for name in self.workers)

        took_s = wait_until(ready, within_s, every_s=0.05)
        if took_s is None:
            said = "\n".join(f"{name}:\n{node.output()[-1500:]}" for name, node in self.nodes.items())
            raise RuntimeError(f"the cluster did not get ready:\n{said}")
        for node in self.nodes.values():
            node.look()
        return took_s

    def counts(self, name: str) -> dict[str, float] | None:
        """Return what a worker's engine counts itself, None if it does not say."""
        with suppress(HTTPException):
            text = self.nodes[name].get("/metrics", timeout_s=2.0)[1].decode()
            if f'espalier_engine_running{{engine="{cluster_engine_name(name)}"}}' in text:
                return {
                    each: metric(text, f"espalier_engine_{each}", engine=cluster_engine_name(name))
                    for each in LOAD_GAUGES
                }
        return None

    def held(self) -> list[str]:
        """Return what any engine or the front still holds of requests, each as a sentence; nothing when all is idle."""
        found = []
        for name in self.workers:
            counts = self.counts(name)
            if counts is None:
                found.append(f"the engine of {name} does not say what it holds")
            elif any(counts.values()):
                found.append(f"the engine of {name} holds {counts}")
        status, body = self.front.get("/metrics")
        if status != 200:
            return [*found, "the front does not say what it holds"]
        numbers = {each: metric(body.decode(), f"espalier_requests_{each}") for each in ("running", "waiting")}
        return found + [f"the front has {number:g} requests {each}" for each, number in numbers.items() if number]

    def wait_idle(self, within_s: float) -> list[str]:
        """Wait until nothing is held; return what still is."""
        wait_until(lambda: not self.held(), within_s, every_s=0.05)
        return self.held()

    def stop(self, within_s: float) -> list[str]:
        """Tell every node to end, the front first; return what was not as it should be."""
        found = []
        for name in reversed(self.plan.names):
            node = self.nodes[name]
            if node.process.poll() is None:
                node.look()
                node.signal(signal.SIGTERM)
                if node.wait_exit(within_s) is None:
                    found.append(f"node {name} did not end within {within_s:g} s")
                    continue
            if node.process.returncode != 0:
                found.append(f"node {name} ended by {node.process.returncode}")
            found += [f"node {name} left {each}" for each in node.left()]
        return found

    def end(self) -> None:
        """Kill whatever is left of any node."""
        for node in self.nodes.values():
            if node.process.poll() is None:
                with suppress(ProcessLookupError):
                    node.signal(signal.SIGCONT)
            node.end()
        for seen in self.outlived():
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)

    def outlived(self) -> list[ProcessEntry]:
        """Return the processes that live of nodes which do not; only those that were seen when their node lived."""
        return [seen for node in self.past for seen in node.known.values() if seen.lives]


@contextmanager
def cluster(folder: Path, plan: Plan, *, before: Callable[[Cluster], None] | None = None) -> Iterator[Cluster]:
    """Start the nodes of a plan, and end them whatever happens in the body; `before` may still change addresses."""
    made = Cluster(plan, folder)
    if before is not None:
        before(made)
    try:
        for name in plan.names:
            made.start(name)
        made.wait_ready()
        yield made
    finally:
        made.end()
