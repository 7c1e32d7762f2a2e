"""Drain and restart every node in turn under steady load: is any request refused or truncated?

A worker gets SIGTERM, its streams finish or move to the other worker within its drain, it exits with 0 and is started
again; at the end the front as well, while which requests are refused. Two fronts share a port, and are restarted in
turn; then no request may be refused at all.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from signal import SIGTERM

from bench.faults.scenario import Run
from bench.rig import checked_clients
from bench.rig.checked_clients import CheckedRequest, GatewayInterruptions, Tally
from bench.rig.cluster import Cluster, Plan, cluster, sglang, simulated
from bench.rig.node import Node

CLIENTS = 16
ENDS_WITHIN_S = 15.0
FRONT_DRAIN_S = 30.0  # longer than any answer takes
DRAIN_S = 1.0  # what has not finished by then must move
REST_S = 2.0  # between two restarts
COSTS = {"fixed_s": 0.03}
MOVED = re.compile(r'"event": "answers go on elsewhere", "count": (\d+)')
AWAY = " while the front was away"
ROUNDS = {"simulated": 5, "sglang": 1}  # a real worker takes some 20 s to come back


def plan(
    drain_s: float, engines: str = "simulated", tokens_max: int = 160, gateways: int = 1, policy: str = "least_loaded"
) -> Plan:
    """Return a plan of two workers that can each serve the whole load; simulated answers have up to `tokens_max`."""
    slots, names = 2 * CLIENTS, ("w1", "w2")
    if engines == "sglang":
        texts = {name: sglang(slots=slots) for name in names}
    else:
        texts = {
            name: simulated(name, slots=slots, costs=COSTS, length_min=16, length_max=tokens_max) for name in names
        }
    model = f'policy = "{policy}"'
    return Plan(texts, drain_s=drain_s, front_drain_s=FRONT_DRAIN_S, gateways=gateways, model=model)


@dataclass
class Load(Tally):
    """The outcomes of a steady load, and the interruptions of the front."""

    interruptions: GatewayInterruptions = field(default_factory=GatewayInterruptions)
    predictions: Counter[str] = field(default_factory=Counter)  # of prompts in caches, by outcome

    def add_predictions(self, front: Node) -> None:
        """Add the predictions of a front at the end of its life."""
        for outcome in ("equal", "more", "less", "blind"):
            self.predictions[outcome] += int(front.metric("espalier_routing_predictions_total", outcome=outcome))

    def note(self, request: CheckedRequest, category: str, why: str | None, took_s: float) -> None:
        """Count one answer."""
        away = self.interruptions.terminations == 1 and category.startswith("refused")
        super().note(request, category + AWAY if away else category, why, took_s)

    @property
    def refused(self) -> int:
        """The number of requests that were refused while the front was away, or had no worker yet."""
        return sum(number for category, number in self.counts.items() if category.endswith(AWAY))

    @property
    def failed(self) -> int:
        """The number of requests that ended in an error, or were refused for any other reason."""
        failures = (number for category, number in self.counts.items() if category.startswith(("error", "refused")))
        return sum(failures) - self.refused

    @property
    def spoilt(self) -> int:
        """The number of answers that were truncated, wrong or without an end."""
        return self.requests - self.counts["whole"] - self.refused - self.failed


@contextmanager
def steady(target: Cluster, clients: int, seed: int) -> Iterator[Load]:
    """Run so many clients while the body runs; yield their outcomes, complete once the body has ended."""
    load, port = Load(), target.client_port
    right = checked_clients.references(port)
    with checked_clients.running(load, port, right, clients, seed, lambda: load.interruptions, leave_share=0.0):
        yield load


def restart(target: Cluster, name: str, ends_within_s: float = ENDS_WITHIN_S) -> tuple[float, float, int]:
    """Drain one node, wait for its exit, and start it again.

    Returns the seconds until it had drained and until it was back, and how many answers moved. Raises `RuntimeError` if
    it did not exit with 0 within `ends_within_s` of its drain's end, left something or did not come back.
    """
    node = target.nodes[name]
    node.observe()
    before = len(node.output())
    since = time.perf_counter()
    node.signal(SIGTERM)
    drain_s = FRONT_DRAIN_S if name in target.plan.fronts else target.plan.drain_s
    drained_s = node.wait_exit(drain_s + ends_within_s)
    if drained_s is None or node.process.returncode != 0:
        raise RuntimeError(f"{name} ended by {node.process.returncode}:\n{node.output()[-2000:]}")
    if left := node.leftovers():
        raise RuntimeError(f"{name} left {left}")
    moved = sum(int(number) for number in MOVED.findall(node.output()[before:]))
    gone_s = time.perf_counter() - since
    target.start(name)
    target.wait_ready()
    return drained_s, time.perf_counter() - since - gone_s, moved


def restart_in_turn(run: Run, target: Cluster, load: Load) -> int:
    """Restart each worker so often, and then each front; return how many answers moved."""
    rounds = run.options.rounds or ROUNDS[run.options.engines]
    fronts = target.plan.fronts * (rounds if target.plan.gateways > 1 else 1)
    moved = 0
    for name in [*target.workers * rounds, *fronts]:
        time.sleep(REST_S)
        if fronts == [name]:  # it is the only one
            load.interruptions = GatewayInterruptions(terminations=1)
        if name in fronts:
            load.add_predictions(target.nodes[name])
        took = restart(target, name)
        moved += took[2]
        run.row(name, *took)
    time.sleep(REST_S)
    load.interruptions = GatewayInterruptions(terminations=2 * (len(fronts) == 1))
    for name in target.plan.fronts:
        load.add_predictions(target.nodes[name])
    return moved


def rolling(run: Run) -> None:
    """Restart each node; any answer that was not whole is wrong."""
    options, moved = run.options, 0
    planned = plan(DRAIN_S, options.engines, gateways=options.gateways, policy=options.policy)
    with cluster(run.folder, planned) as target:
        with steady(target, CLIENTS, options.seed) as load:
            try:
                moved = restart_in_turn(run, target, load)
            except RuntimeError as error:
                run.wrong.append(str(error))
        run.wrong += load.bad + target.wait_idle(10.0) + target.stop(ENDS_WITHIN_S)
    ends = f"{load.failed} failed, {load.spoilt} truncated or wrong"
    run.check(not load.failed and not load.spoilt, ends)
    run.notes += [f"{load.requests} requests: {ends}; {moved} answers moved", *load.lines()]
    if (routed := load.predictions.total()) and options.policy == "kv":
        blind = load.predictions["blind"]
        run.notes.append(f"routed blind: {blind} of {routed}, {blind / routed:.2%}: {dict(load.predictions)}")
