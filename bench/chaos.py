"""Random faults of a cluster under load: killed, stopped and drained processes, cut links. Is any answer wrong?

A front and its workers, each node a process; the workers are reached through proxies that cut, hold, half-open and
slow their connections. With real engines, hosts, schedulers and zygotes get signals as well. Every client compares
its answers with those of an undisturbed cluster: each is whole or ends in an error. Dead nodes are started again. After
the faults are healed, within a stated time every engine serves requests again, no request is held, and every node exits
with 0 and leaves nothing. The command that is printed first replays the plan of faults.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread

from bench.rig import checked_clients
from bench.rig.checked_clients import CheckedRequest, GatewayInterruptions, Tally
from bench.rig.cluster import Cluster, Plan, cluster, cluster_engine_name, node_engine_name, sglang, simulated
from bench.rig.faults import ENGINES, NODES, SHUTDOWN_MAX_S, FaultInjector, plan_faults
from bench.rig.node import metric, short_folder
from bench.rig.processes import SHARED_MEMORY
from bench.rig.proxy import FaultProxy

DRAIN_S = 2.0
IDLE_WITHIN_S = 20.0
WATCH_S = 0.5
RESUME_KINDS = ("resumed", "retried")
COSTS = {"fixed_s": 0.03, "per_prefill_token_s": 0.0005, "transfer_s": 0.05}
GATEWAY = "first_token_s = 30.0\ntotal_s = 50.0\n"
SHORT_DEADLINES = "[engine.{name}.deadlines]\ngap_s = 5.0\n"  # shorter than some stops of a process


@dataclass(frozen=True)
class Kind:
    """The settings of one kind of engines."""

    workers: tuple[str, ...]  # without a pair, when each computes whole requests
    clients: int
    every_s: float  # between two faults, on the average
    faults: dict[str, int]
    healed_within_s: float  # until every engine can be asked again


KINDS = {
    "simulated": Kind(("w1", "w2", "w3"), 32, 1.5, NODES, 60.0),
    "sglang": Kind(("w1", "w2"), 12, 3.0, ENGINES, 120.0),
}


def plan(engines: str, *, pair: bool) -> Plan:
    """Return the plan of a cluster: equal workers, or a prefill, a decode and a worker of both legs."""
    legs = dict.fromkeys(KINDS[engines].workers, "both")
    if pair:
        legs = {"w1": "prefill", "w2": "decode", "w3": "both"}
    if engines == "sglang":
        texts = {name: sglang(leg) + SHORT_DEADLINES.format(name=node_engine_name(name)) for name, leg in legs.items()}
    else:
        slots = KINDS[engines].clients
        texts = {
            name: simulated(name, leg, slots=slots, costs=COSTS, length_min=16, length_max=96)
            for name, leg in legs.items()
        }
    return Plan(texts, gateway=GATEWAY, drain_s=DRAIN_S)


# Outcomes --------------------------------------------------------------------------------


@dataclass
class ResumeCounts:
    """The requests that continued on another worker, by the last scrape of each front process; later ones are lost."""

    target: Cluster
    _counts: dict[int, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Scrape the front again and again while the body runs."""
        over = Event()
        thread = Thread(target=self._watch, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._scrape()

    def _watch(self, over: Event) -> None:
        while not over.wait(WATCH_S):
            self._scrape()

    def _scrape(self) -> None:
        front = self.target.front
        if text := front.get("/metrics", timeout_s=WATCH_S)[1].decode():
            self._counts[front.pid] = {kind: metric(text, "espalier_resumes_total", kind=kind) for kind in RESUME_KINDS}

    def __str__(self) -> str:
        resumed, retried = (sum(counts[kind] for counts in self._counts.values()) for kind in RESUME_KINDS)
        return f"continued on another worker, at least: {resumed:g} in mid-answer, {retried:g} before it"


def table(tally: Tally, resumes: object, done: Counter[str]) -> Iterator[str]:
    """Yield the counts of one run, line by line."""
    bad = {category: tally.counts[category] for category in ("WRONG", "CUT", "NO END")}
    yield f"{tally.requests:>7}  requests; the slowest took {tally.slowest_s:.1f} s"
    yield from (line for line in tally.lines() if line.split(maxsplit=1)[1] not in bad)
    yield f"{bad['WRONG']:>7}  wrong"
    yield f"{bad['CUT']:>7}  truncated without an error"
    yield f"{bad['NO END']:>7}  without an end"
    yield str(resumes)
    yield "faults: " + ", ".join(f"{fault} {times}" for fault, times in sorted(done.items()) if times)


# Checks after the faults -----------------------------------------------------------------


def healed(target: Cluster, within_s: float) -> list[str]:
    """Wait until every engine can get requests, as it must soon after the last fault; return why not, if it cannot."""
    try:
        took_s = target.wait_ready(within_s)
    except RuntimeError as error:
        return [str(error)]
    print(f"every engine could get requests {took_s:.1f} s after the last fault was healed (at most {within_s:g})")
    return []


def aftermath(target: Cluster, right: checked_clients.References) -> list[str]:
    """End a healed cluster; return a sentence for everything that does not hold of it before and after."""
    wrong = [f"{IDLE_WITHIN_S:g} s later {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    before = _calls(target)
    requests = [CheckedRequest("stream", prompt, None) for prompt in checked_clients.CHECKED_PROMPTS] * 6
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(partial(checked_clients.send, target.front.port), requests))
    for request, answer in zip(requests, answers, strict=True):
        _, why = checked_clients.verdict(
            request, answer, right[request.prompt, None], left=False, gateway=GatewayInterruptions()
        )
        if why or not answer.whole:
            wrong.append(f"not served at the end: {why or answer}")
    calls = {name: number - before[name] for name, number in _calls(target).items()}
    print(
        f"{len(requests)} more requests: " + ", ".join(f"{name} got {number:g} calls" for name, number in calls.items())
    )
    # Beside a pair, a worker of both legs is a reserve.
    pair = any("leg =" in text for text in target.plan.engines.values())
    for name, text in target.plan.engines.items():
        if not calls[name] and (not pair or "leg =" in text):
            wrong.append(f"{name} got no calls at the end")
    wrong += [f"at rest {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    wrong += target.stop(SHUTDOWN_MAX_S)
    return wrong + [f"process {each.pid} has outlived its node: {each.command}" for each in target.outlived()]


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


def storm(target: Cluster, proxies: dict[str, FaultProxy], kind: Kind, seconds: float, seed: int) -> list[str]:
    """Run the load and the faults, print the outcomes, and return what was wrong."""
    tally, resumes, injector = Tally(), ResumeCounts(target), FaultInjector(target, proxies)
    port, right = target.front.port, checked_clients.references(target.front.port)
    with (
        resumes.watched(),
        checked_clients.running(tally, port, right, kind.clients, seed, lambda: injector.interruptions),
    ):
        injector.run(plan_faults(seed, seconds, kind.every_s, kind.faults), seconds)
        down = healed(target, kind.healed_within_s)  # under load
    print("\n".join(table(tally, resumes, injector.done)))
    return injector.bad + tally.bad + (down or aftermath(target, right)) + bugs(target)


def main() -> int:
    """Run for so many minutes, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", choices=KINDS, default="simulated")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--pair", action="store_true", help="a prefill, a decode and a worker of both legs")
    parser.add_argument("--logs", help="a folder to which the logs of nodes and engines are copied at the end")
    arguments = parser.parse_args()
    options = f"{' --pair' * arguments.pair} --minutes {arguments.minutes:g} --seed {arguments.seed}"
    replay = f"python -m bench.chaos --engines {arguments.engines}{options}"
    print(replay, flush=True)
    shared = set(SHARED_MEMORY.iterdir())
    proxies: dict[str, FaultProxy] = {}

    def behind_proxies(target: Cluster) -> None:
        for name in target.workers:
            proxies[name] = FaultProxy(target.link_ports[name])
            target.dialed_ports[name] = proxies[name].port

    planned = plan(arguments.engines, pair=arguments.pair)
    with short_folder() as folder, cluster(folder, planned, before=behind_proxies) as target:
        try:
            bad = storm(target, proxies, KINDS[arguments.engines], 60 * arguments.minutes, arguments.seed)
        finally:
            for proxy in proxies.values():
                proxy.close()
            if arguments.logs:
                keep_logs(target, Path(arguments.logs))
    bad += [f"{path} is left" for path in sorted(set(SHARED_MEMORY.iterdir()) - shared)]
    for line in bad:
        print(f"BAD: {line}\n")
    print(f"{len(bad)} bad; seed {arguments.seed}: {replay}")
    return 1 if bad else 0


def keep_logs(target: Cluster, folder: Path) -> None:
    """Copy the logs of the nodes and their engines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in target.nodes.items():
        (folder / f"{name}.log").write_text(node.output())
        shutil.copytree(node.folder / "logs", folder / name, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
