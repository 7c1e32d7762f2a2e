"""Random faults of a cluster under load: killed, stopped and drained processes, cut links. Is any answer wrong?

A front and its workers, each node a process; the workers are reached through proxies that cut, hold, halve and slow
their connections. With real engines their hosts, schedulers and zygotes are harmed as well. Every client compares what
it hears with what a quiet cluster said: an answer is whole or ends in an error. Whatever has died is started again. In
the end all is healed: within a stated time every engine is asked again, nothing is held, every node ends well and
leaves nothing. One line replays the plan of harm.
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
from pathlib import Path
from random import Random
from threading import Event, Thread

from bench.rig import checked_clients
from bench.rig.checked_clients import CheckedRequest, CompleteAnswer, GatewayInterruptions, Tally
from bench.rig.cluster import Cluster, Plan, cluster, cluster_engine_name, node_engine_name, sglang, simulated
from bench.rig.faults import ENGINES, NODES, SHUTDOWN_MAX_S, FaultInjector, plan_faults
from bench.rig.node import SHARED_MEMORY, metric, place
from bench.rig.proxy import FaultProxy

DRAIN_S = 2.0
IDLE_WITHIN_S = 20.0
WATCH_S = 0.5
COSTS = {"fixed_s": 0.03, "per_prefill_token_s": 0.0005, "transfer_s": 0.05}
GATEWAY = "first_token_s = 30.0\ntotal_s = 50.0\n"
IMPATIENT = "[engine.{name}.deadlines]\ngap_s = 5.0\nrelease_s = 3.0\n"  # less than some process is stopped for


@dataclass(frozen=True)
class Kind:
    """The settings of one kind of engines."""

    workers: tuple[str, ...]  # where each computes all of an answer
    clients: int
    every_s: float  # between two faults, on the average
    faults: dict[str, int]
    healed_within_s: float  # until every engine can be asked again


KINDS = {
    "simulated": Kind(("w1", "w2", "w3"), 32, 1.5, NODES, 60.0),
    "sglang": Kind(("w1", "w2"), 12, 3.0, ENGINES, 120.0),
}


def plan(engines: str, *, pair: bool) -> Plan:
    """Return the cluster: workers alike, or a prefill, a decode and one that computes both."""
    legs = dict.fromkeys(KINDS[engines].workers, "both")
    if pair:
        legs = {"w1": "prefill", "w2": "decode", "w3": "both"}
    if engines == "sglang":
        texts = {name: sglang(leg) + IMPATIENT.format(name=node_engine_name(name)) for name, leg in legs.items()}
    else:
        slots = KINDS[engines].clients
        texts = {
            name: simulated(name, leg, slots=slots, costs=COSTS, length_min=16, length_max=96)
            for name, leg in legs.items()
        }
    return Plan(texts, gateway=GATEWAY, drain_s=DRAIN_S)


# What came of it -------------------------------------------------------------------------


@dataclass
class Moves:
    """How many requests went on elsewhere, by what each front said last; what it did after that is not known."""

    target: Cluster
    _said: dict[int, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again while the body runs."""
        over = Event()
        thread = Thread(target=self._watch, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._look()

    def _watch(self, over: Event) -> None:
        while not over.wait(WATCH_S):
            self._look()

    def _look(self) -> None:
        front = self.target.front
        if text := front.get("/metrics", timeout_s=WATCH_S)[1].decode():
            counts = {each: metric(text, "espalier_resumes_total", kind=each) for each in ("resumed", "retried")}
            self._said[front.pid] = counts

    def __str__(self) -> str:
        total = {each: sum(said[each] for said in self._said.values()) for each in ("resumed", "retried")}
        return f"went on elsewhere, at least: {total['resumed']:g} in mid-answer, {total['retried']:g} before it"


def table(tally: Tally, moves: Moves, done: Counter[str]) -> Iterator[str]:
    """Yield the counts of one run, line by line."""
    bad = {how: tally.counts[how] for how in ("WRONG", "CUT", "NO END")}
    yield f"{tally.requests:>7}  requests; the slowest took {tally.slowest_s:.1f} s"
    yield from (line for line in tally.lines() if line.split(maxsplit=1)[1] not in bad)
    yield f"{bad['WRONG']:>7}  wrong"
    yield f"{bad['CUT']:>7}  truncated without an error"
    yield f"{bad['NO END']:>7}  without an end"
    yield str(moves)
    yield "harm: " + ", ".join(f"{fault} {times}" for fault, times in sorted(done.items()) if times)


# What must hold in the end ---------------------------------------------------------------


def healed(target: Cluster, within_s: float) -> list[str]:
    """Wait until every engine can be asked, as it must be soon after the last harm; return why not, if so."""
    try:
        took_s = target.wait_ready(within_s)
    except RuntimeError as error:
        return [str(error)]
    print(f"every engine could be asked {took_s:.1f} s after the last harm was healed (at most {within_s:g})")
    return []


def aftermath(target: Cluster, right: dict[tuple[str, int | None], CompleteAnswer]) -> list[str]:
    """Return what does not hold of a cluster that was healed, and end it."""
    found = [f"{IDLE_WITHIN_S:g} s later {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    before = _asked(target)
    asks = [CheckedRequest("stream", prompt, None) for prompt in checked_clients.ASKED_PROMPTS] * 6
    with ThreadPoolExecutor(len(asks)) as pool:
        answers = list(pool.map(lambda each: checked_clients.ask(target.front.port, each), asks))
    for wanted, answer in zip(asks, answers, strict=True):
        _, why = checked_clients.verdict(
            wanted, answer, right[wanted.prompt, None], left=False, door=GatewayInterruptions()
        )
        if why or not answer.whole:
            found.append(f"not served in the end: {why or answer}")
    served = {name: asked - before[name] for name, asked in _asked(target).items()}
    print(f"{len(asks)} more requests: " + ", ".join(f"{name} was asked {times:g}" for name, times in served.items()))
    pair = any("leg =" in text for text in target.plan.engines.values())  # then whoever computes both is only a reserve
    for name, text in target.plan.engines.items():
        if not served[name] and (not pair or "leg =" in text):
            found.append(f"nobody asked {name} in the end")
    found += [f"at rest {each}" for each in target.wait_idle(IDLE_WITHIN_S)]
    found += target.stop(SHUTDOWN_MAX_S)
    return found + [f"process {seen.pid} has outlived its node: {seen.command}" for seen in target.outlived()]


def _asked(target: Cluster) -> dict[str, float]:
    text = target.front.get("/metrics")[1].decode()
    return {
        name: metric(text, "espalier_worker_calls_total", worker=cluster_engine_name(name)) for name in target.workers
    }


def bugs(target: Cluster) -> list[str]:
    """Return the traces of bugs in what the nodes have logged, each kind once with how often it came.

    That an engine which was killed again and again is given up for a while is none: its tree says so, and begins anew.
    """
    kinds: Counter[str] = Counter()
    samples: dict[str, str] = {}
    for name, node in target.nodes.items():
        for line in node.output().splitlines():
            if '"traceback"' not in line and '"level": "error"' not in line and "Traceback" not in line:
                continue
            try:
                said = json.loads(line)
            except ValueError:
                said = {"event": line}
            if said.get("child_event") == "gave_up":
                continue
            last = str(said.get("traceback", "")).strip().rpartition("\n")[2]
            kind = f"{said.get('event')}: {last}"
            kinds[kind] += 1
            samples.setdefault(kind, f"node {name}: {said.get('traceback') or line}")
    return [f"{number} times {kind}\n{samples[kind][-3000:]}" for kind, number in kinds.items()]


# All of it -------------------------------------------------------------------------------


def storm(target: Cluster, cutters: dict[str, FaultProxy], kind: Kind, seconds: float, seed: int) -> list[str]:
    """Run the load and the faults, print the outcomes, and return what was wrong."""
    tally, over, moves = Tally(), Event(), Moves(target)
    right = checked_clients.references(target.front.port)
    chaos = FaultInjector(target, cutters)
    clients = [
        Thread(
            target=checked_clients.client,
            args=(tally, target.front.port, Random(seed * 1000 + number), right, over, lambda: chaos.door),
            daemon=True,
        )
        for number in range(kind.clients)
    ]
    with moves.watched():
        for each in clients:
            each.start()
        chaos.run(plan_faults(seed, seconds, kind.every_s, kind.faults), seconds)
        down = healed(target, kind.healed_within_s)  # under load
        over.set()
        for each in clients:
            each.join(checked_clients.NEVER_S + 30.0)
    never = sum(each.is_alive() for each in clients)
    print("\n".join(table(tally, moves, chaos.done)))
    bad = chaos.bad + tally.bad + [f"{never} clients never ended"] * bool(never)
    return bad + (down or aftermath(target, right)) + bugs(target)


def main() -> int:
    """Run for so many minutes, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", choices=KINDS, default="simulated")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--pair", action="store_true", help="a prefill, a decode and one that computes both")
    parser.add_argument("--logs", help="a folder to which the logs of nodes and engines are copied in the end")
    said = parser.parse_args()
    pair = " --pair" * said.pair
    replay = f"python -m bench.chaos --engines {said.engines}{pair} --minutes {said.minutes:g} --seed {said.seed}"
    print(replay, flush=True)
    shared = set(SHARED_MEMORY.iterdir())
    cutters: dict[str, FaultProxy] = {}

    def behind_cutters(target: Cluster) -> None:
        for name in target.workers:
            cutters[name] = FaultProxy(target.links[name])
            target.doors[name] = cutters[name].port

    with place() as folder, cluster(folder, plan(said.engines, pair=said.pair), before=behind_cutters) as target:
        try:
            bad = storm(target, cutters, KINDS[said.engines], 60 * said.minutes, said.seed)
        finally:
            for cutter in cutters.values():
                cutter.close()
            if said.logs:
                keep_logs(target, Path(said.logs))
    bad += [f"{path} is left" for path in sorted(set(SHARED_MEMORY.iterdir()) - shared)]
    for line in bad:
        print(f"BAD: {line}\n")
    print(f"{len(bad)} bad; seed {said.seed}: {replay}")
    return 1 if bad else 0


def keep_logs(target: Cluster, folder: Path) -> None:
    """Copy what the nodes and their engines have logged."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, node in target.nodes.items():
        (folder / f"{name}.log").write_text(node.output())
        shutil.copytree(node.folder / "logs", folder / name, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
