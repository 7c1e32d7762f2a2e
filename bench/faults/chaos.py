"""Random faults of a cluster under load: killed, stopped and drained processes, cut links. Is any answer wrong?

A front and its workers, each node a process; the workers are reached through proxies that cut, hold, half-open and
slow their connections. With real engines, hosts, schedulers and zygotes get signals as well. Every client compares
its answers with those of an undisturbed cluster: each is whole or ends in an error. Dead nodes are started again. After
the faults are healed, within a stated time every engine serves requests again, no request is held, and every node exits
with 0 and leaves nothing. The same seed replays the faults of each node, process and link.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from bench.faults.injector import ENGINES, NODES, SHUTDOWN_MAX_S, FaultInjector
from bench.faults.proxy import FaultProxy
from bench.faults.scenario import Run
from bench.rig import checked_clients
from bench.rig.checked_clients import CheckedRequest, GatewayInterruptions, References, Tally
from bench.rig.cluster import Cluster, Plan, cluster, cluster_engine_name, node_engine_name, sglang, simulated
from bench.rig.node import metric
from bench.rig.processes import SHARED_MEMORY

DRAIN_S = 2.0
IDLE_WITHIN_S = 20.0
BAD = ("WRONG", "CUT", "NO END")
COSTS = {"fixed_s": 0.03, "per_prefill_token_s": 0.0005, "transfer_s": 0.05}
GATEWAY = "first_token_s = 30.0\ntotal_s = 50.0\n"
SHORT_DEADLINES = "[engine.{name}.deadlines]\ngap_s = 5.0\n"  # shorter than some stops of a process


@dataclass(frozen=True)
class Kind:
    """The settings of one kind of engines."""

    workers: tuple[str, ...]
    clients: int
    every_s: float  # between two faults, on the average
    faults: Mapping[str, Mapping[str, int]]  # how often each happens beside the others, by its target
    healed_within_s: float  # until every engine can be asked again


KINDS = {
    "simulated": Kind(("w1", "w2", "w3"), 32, 1.5, NODES, 60.0),
    "sglang": Kind(("w1", "w2"), 12, 3.0, ENGINES, 120.0),
}


def plan(engines: str) -> Plan:
    """Return the plan of a cluster of equal workers."""
    names, slots = KINDS[engines].workers, KINDS[engines].clients
    if engines == "sglang":
        texts = {name: sglang() + SHORT_DEADLINES.format(name=node_engine_name(name)) for name in names}
    else:
        texts = {name: simulated(name, slots=slots, costs=COSTS, length_min=16, length_max=96) for name in names}
    return Plan(texts, gateway=GATEWAY, drain_s=DRAIN_S)


# Checks after the faults -----------------------------------------------------------------


def aftermath(run: Run, target: Cluster, right: References) -> None:
    """End a healed cluster, and check that it serves, holds nothing and leaves nothing."""
    run.wrong += [f"{IDLE_WITHIN_S:g} s later {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    before = _calls(target)
    requests = [CheckedRequest("stream", prompt, None) for prompt in checked_clients.CHECKED_PROMPTS] * 6
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(partial(checked_clients.send, target.front.port), requests))
    for request, answer in zip(requests, answers, strict=True):
        _, why = checked_clients.verdict(
            request, answer, right[request.prompt, None], left=False, gateway=GatewayInterruptions()
        )
        run.check(not why and answer.whole, f"not served at the end: {why or answer}")
    calls = {name: number - before[name] for name, number in _calls(target).items()}
    run.notes.append(f"calls of {len(requests)} more requests: {calls}")
    for name, number in calls.items():
        run.check(number, f"{name} got no calls at the end")
    run.wrong += [f"at rest {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    run.wrong += target.stop(SHUTDOWN_MAX_S)
    run.wrong += [f"process {each.pid} has outlived its node: {each.command}" for each in target.outlived()]


def _calls(target: Cluster) -> dict[str, float]:
    text = target.front.get("/metrics")[1].decode()
    return {
        name: metric(text, "espalier_worker_calls_total", worker=cluster_engine_name(name)) for name in target.workers
    }


def bugs(target: Cluster) -> list[str]:
    """Return the tracebacks and errors in the nodes' logs, each kind once with its number.

    `gave_up` is none: it is logged of an engine that was killed again and again, and is then retried.
    """
    kinds: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for name, node in target.nodes.items():
        for line in node.output().splitlines():
            if '"traceback"' not in line and '"level": "error"' not in line and "Traceback" not in line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"event": line}
            if entry.get("child_event") == "gave_up":
                continue
            last = str(entry.get("traceback", "")).strip().rpartition("\n")[2]
            kind = f"{entry.get('event')}: {last}"
            kinds[kind] += 1
            samples.setdefault(kind, f"node {name}: {entry.get('traceback') or line}")
    return [f"{number} times {kind}\n{samples[kind][-3000:]}" for kind, number in kinds.items()]


# The run ---------------------------------------------------------------------------------


def storm(run: Run, target: Cluster, kind: Kind, proxies: dict[str, FaultProxy], seconds: float, seed: int) -> None:
    """Run the load and the faults, add the outcomes, and check what holds after them."""
    tally, injector = Tally(), FaultInjector(target, proxies)
    port, right = target.front.port, checked_clients.references(target.front.port)
    down = list[str]()
    with checked_clients.running(tally, port, right, kind.clients, seed, lambda: injector.interruptions):
        injector.run(kind.faults, kind.every_s, seconds, seed)
        try:
            took_s = target.wait_ready(kind.healed_within_s)  # under load
            run.notes.append(f"every engine could get requests {took_s:.1f} s after the last fault was healed")
        except RuntimeError as error:
            down = [str(error)]
    for category, count in (*tally.counts.most_common(), *((each, 0) for each in BAD if each not in tally.counts)):
        run.row(category, count)
    resumed, retried = (target.front.metric("espalier_resumes_total", kind=kind) for kind in ("resumed", "retried"))
    run.notes += [
        f"{tally.requests} requests; the slowest took {tally.slowest_s:.1f} s",
        f"went on elsewhere, since the front's last start: {resumed:g} in mid-answer, {retried:g} before it",
    ]
    run.notes.append("faults: " + ", ".join(f"{fault} {times}" for fault, times in sorted(injector.done.items())))
    run.wrong += injector.bad + tally.bad + down
    if not down:
        aftermath(run, target, right)
    run.wrong += bugs(target)


def behind_proxies(target: Cluster, proxies: dict[str, FaultProxy]) -> None:
    """Put a proxy before each worker."""
    for name in target.workers:
        proxies[name] = FaultProxy(target.link_ports[name])
        target.dialed_ports[name] = proxies[name].port


def chaos(run: Run) -> None:
    """Run for so many minutes."""
    options, proxies = run.options, dict[str, FaultProxy]()
    shared = set(SHARED_MEMORY.iterdir())
    with cluster(run.folder, plan(options.engines), before=partial(behind_proxies, proxies=proxies)) as target:
        try:
            storm(run, target, KINDS[options.engines], proxies, 60 * options.minutes, options.seed)
        finally:
            for proxy in proxies.values():
                proxy.close()
    run.wrong += [f"{path} is left" for path in sorted(set(SHARED_MEMORY.iterdir()) - shared)]
