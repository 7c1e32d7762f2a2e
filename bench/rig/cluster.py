"""A cluster to measure: several nodes on this machine, each a process of its own, all of them always ended.

Each node reads a file of its own. All files describe the same cluster but for two things. Each places the gateway on
its own node, so that every node has a `/metrics` of its own, with fresh counts of its engines at each scrape; with
`one_gateway` they have an endpoint for metrics instead. And a file may have the address of a proxy in place of a node's
own. Several fronts share the port for clients, and each has a port of its own for metrics.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.rig.node import MODEL, READY_WITHIN_S, ROOT, Node, free_ports, metric, start_process, wait_until
from bench.rig.processes import MARK, ProcessEntry

FRONT = "front"
LOAD_GAUGES = ("running", "waiting", "kv_tokens_used")

FILE = """\
[cluster]
{cluster}
{nodes}
[gateway]
nodes = {gateways}
port = {port}
{gateway}
[model.{model}]
path = "{path}"
{model_lines}
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
context_max = {context_max}
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


def simulated(
    node: str,
    leg: str = "both",
    *,
    slots: int = 16,
    context_max: int = 8192,
    costs: Mapping[str, float] | None = None,
    **settings: float,
) -> str:
    """Return the section of a simulated engine on a node; `settings` are the keys of its table `simulated`."""
    return SIMULATED.format(
        name=node_engine_name(node),
        slots=slots,
        leg=_leg(leg),
        context_max=context_max,
        simulated=lines(settings),
        costs=lines(costs or {}),
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


def engine_load(text: str, node: str) -> dict[str, float] | None:
    """Return the counts of a node's engine in a scrape, None if the engine did not answer it."""
    name = cluster_engine_name(node)
    if f'espalier_engine_running{{engine="{name}"}}' not in text:
        return None
    return {gauge: metric(text, f"espalier_engine_{gauge}", engine=name) for gauge in LOAD_GAUGES}


def _leg(leg: str) -> str:
    return "" if leg == "both" else f'leg = "{leg}"'


def lines(values: Mapping[str, object]) -> str:
    """Return the keys of a table, a line each."""
    return "\n".join(f"{key} = {value}" for key, value in values.items())


@dataclass(frozen=True)
class Plan:
    """The description of a cluster: a front, and a worker node for each engine's section."""

    engines: Mapping[str, str]  # by the node's name
    cluster: str = ""  # lines of their tables
    gateway: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # of the nodes
    model: str = ""
    drain_s: float = 30.0
    front_drain_s: float | None = None  # if it differs
    gateways: int = 1  # fronts, which share a port
    one_gateway: bool = False  # no other node has one
    model_path: Path = ROOT / "examples" / MODEL

    @property
    def fronts(self) -> list[str]:
        """The nodes that clients connect to."""
        return [FRONT, *(f"{FRONT}-{number}" for number in range(2, self.gateways + 1))]

    @property
    def names(self) -> list[str]:
        """Every node, the workers first: they listen before a front dials them."""
        return [*self.engines, *self.fronts]


@dataclass
class Cluster:
    """The nodes of one plan as they come and go; a node that is started again has its old ports and folders."""

    plan: Plan
    folder: Path
    gateway_ports: dict[str, int] = field(default_factory=dict)
    link_ports: dict[str, int] = field(default_factory=dict)  # where each worker listens for other nodes
    metrics_ports: dict[str, int] = field(default_factory=dict)  # of each node whose gateway is not its own
    dialed_ports: dict[str, int] = field(default_factory=dict)  # where other nodes dial it, if that is another port
    nodes: dict[str, Node] = field(default_factory=dict)  # the latest process of each name
    past: list[Node] = field(default_factory=list)  # the processes before them

    def __post_init__(self) -> None:
        ports = iter(free_ports(3 * len(self.plan.names)))
        for name in self.plan.names:
            self.gateway_ports[name] = next(ports)
            if name not in self.plan.fronts:
                self.link_ports[name] = next(ports)
                if self.plan.one_gateway:
                    self.metrics_ports[name] = next(ports)
            elif self.plan.gateways > 1:
                self.metrics_ports[name] = next(ports)
                self.gateway_ports[name] = self.gateway_ports[FRONT]
            for subfolder in ("t", "logs"):
                (self.folder / name / subfolder).mkdir(parents=True, exist_ok=True)

    @property
    def front(self) -> Node:
        """The node that clients connect to."""
        return self.nodes[FRONT]

    @property
    def fronts(self) -> list[Node]:
        """The nodes that clients connect to."""
        return [self.nodes[name] for name in self.plan.fronts]

    @property
    def client_port(self) -> int:
        """The port that clients connect to."""
        return self.gateway_ports[FRONT]

    @property
    def workers(self) -> list[str]:
        """The names of the nodes that have an engine."""
        return list(self.plan.engines)

    def file(self, name: str) -> str:
        """Return the configuration file of one node."""
        plan, folder = self.plan, self.folder / name
        nodes = []
        for each in plan.names:
            port = self.link_ports.get(each) if each == name else self.dialed_ports.get(each, self.link_ports.get(each))
            listen = "" if port is None else f'listen = "127.0.0.1:{port}"\n'
            if each in self.metrics_ports:
                listen += f'metrics = "127.0.0.1:{self.metrics_ports[each]}"'
            drain_s = plan.drain_s if each not in plan.fronts or plan.front_drain_s is None else plan.front_drain_s
            nodes.append(NODE.format(name=each, drain_s=drain_s, logs=folder / "logs", listen=listen))
        engines = [
            ENGINE.format(name=node_engine_name(node), node=node, model=MODEL, text=text)
            for node, text in plan.engines.items()
        ]
        return FILE.format(
            cluster=plan.cluster,
            nodes="".join(nodes),
            gateways=json.dumps(self._gateways(name)),
            port=self.gateway_ports[name],
            gateway=plan.gateway if name in plan.fronts else "",
            model=MODEL,
            path=plan.model_path,
            model_lines=plan.model,
            engines="".join(engines),
        )

    def _gateways(self, name: str) -> list[str]:
        if self.plan.one_gateway:
            return self.plan.fronts
        return list(dict.fromkeys([*(self.plan.fronts if self.plan.gateways > 1 else ()), name]))

    def start(self, name: str) -> Node:
        """Start a node, without waiting for it.

        The calling thread must live as long as the node: the kernel kills the node when that thread ends.
        """
        folder = self.folder / name
        cluster, tmp = folder / "cluster.toml", folder / "t"
        cluster.write_text(self.file(name))
        mark = f"{os.getpid()}-{self.gateway_ports[name]}-{len(self.nodes) + len(self.past)}"  # of this process alone
        with (folder / "output").open("ab") as output:
            process = start_process(
                ["--node", name, str(cluster)], output, {**self.plan.environment, "TMPDIR": str(tmp), MARK: mark}
            )
        port = self.metrics_ports.get(name, self.gateway_ports[name])
        node = Node(process, port, folder, tmp, mark, time.perf_counter())
        if (previous := self.nodes.get(name)) is not None:
            node.shared_memory |= previous.shared_memory
            self.past.append(previous)
        self.nodes[name] = node
        return node

    def engines_up(self) -> set[str]:
        """Return the workers that every front can send requests to."""
        texts = [front.get("/metrics")[1].decode() for front in self.fronts]
        engines = {name: cluster_engine_name(name) for name in self.workers}
        return {
            name
            for name, engine in engines.items()
            if all(metric(text, "espalier_engine_up", engine=engine) for text in texts)
        }

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Return after how many seconds every node was ready and every engine up; raises `RuntimeError` otherwise."""

        def ready() -> bool:
            for name, node in self.nodes.items():
                if node.process.poll() is not None:
                    raise RuntimeError(f"node {name} ended:\n{node.output()[-3000:]}")
            if any(front.get("/ready")[0] != 200 for front in self.fronts) or self.engines_up() != set(self.workers):
                return False
            return all(self.counts(name) is not None for name in self.workers)

        took_s = wait_until(ready, within_s, every_s=0.05)
        if took_s is None:
            logs = "\n".join(f"{name}:\n{node.output()[-1500:]}" for name, node in self.nodes.items())
            raise RuntimeError(f"the cluster did not get ready:\n{logs}")
        for node in self.nodes.values():
            node.observe()
        return took_s

    def counts(self, name: str) -> dict[str, float] | None:
        """Return the counts of a worker's engine, None if its node has none from it."""
        return engine_load(self.nodes[name].get("/metrics")[1].decode(), name)

    def held(self) -> list[str]:
        """Return a sentence for each engine that holds requests, and for the front; nothing when all are idle."""
        sentences = []
        for name in self.workers:
            counts = self.counts(name)
            if counts is None:
                sentences.append(f"the engine of {name} does not report its load")
            elif any(counts.values()):
                sentences.append(f"the engine of {name} holds {counts}")
        for name, front in zip(self.plan.fronts, self.fronts, strict=True):
            status, body = front.get("/metrics")
            if status != 200:
                sentences.append(f"the {name} does not report its load")
                continue
            numbers = {state: metric(body.decode(), f"espalier_requests_{state}") for state in ("running", "waiting")}
            sentences += [f"the {name} has {number:g} requests {state}" for state, number in numbers.items() if number]
        return sentences

    def wait_idle(self, within_s: float) -> list[str]:
        """Wait until no request is held; return the sentences of `held` for what still is."""
        wait_until(lambda: not self.held(), within_s, every_s=0.05)
        return self.held()

    def stop(self, within_s: float) -> list[str]:
        """Send SIGTERM to every node, the front first; return a sentence for each that did not end cleanly."""
        sentences = []
        for name in reversed(self.plan.names):
            node = self.nodes[name]
            if node.process.poll() is None:
                node.observe()
                node.signal(signal.SIGTERM)
                if node.wait_exit(within_s) is None:
                    sentences.append(f"node {name} did not end within {within_s:g} s")
                    continue
            if node.process.returncode != 0:
                sentences.append(f"node {name} ended by {node.process.returncode}")
            sentences += [f"node {name} left {each}" for each in node.leftovers()]
        return sentences

    def end(self) -> None:
        """Kill every process of every node."""
        for node in self.nodes.values():
            if node.process.poll() is None:
                with suppress(ProcessLookupError):
                    node.signal(signal.SIGCONT)
            node.end()
        for process in self.outlived():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def outlived(self) -> list[ProcessEntry]:
        """Return the living processes of dead nodes, as far as they were observed in their node's life."""
        return [process for node in self.past for process in node.observed.values() if process.lives]


@contextmanager
def cluster(folder: Path, plan: Plan, *, before: Callable[[Cluster], None] | None = None) -> Iterator[Cluster]:
    """Start the nodes of a plan, and end them with the body; `before` may still change addresses."""
    running = Cluster(plan, folder)
    if before is not None:
        before(running)
    try:
        for name in plan.names:
            running.start(name)
        running.wait_ready()
        yield running
    finally:
        running.end()
