"""Rounds of a load on servers with several ways to route, and what came of them.

Every round starts each server anew, without anything in its caches, and sends it the load, in turns. Each request has a
connection of its own: Dynamo's front end leaves Nagle's algorithm on, and the first token of an answer on a connection
that was used before waits up to 40 ms for the client's acknowledgement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field

from bench.cost.accounts import take
from bench.load import measure
from bench.load.messages import Job, Record, Target
from bench.load.plan import Pace, Workload
from bench.load.process import run_to_end
from bench.peers.peer import MODEL, Peer, Setup
from bench.peers.running import Running, started
from bench.rig.node import free_port, metric, short_folder, wait_until
from bench.rig.result import Cell, Table
from bench.rig.table_text import table_text
from bench.routing.loads import NAMES, STEP_S, Load

SLOTS = 8
SETTLED_S = 1.5  # after a start or a load
READY_WITHIN_S = 120.0
ROUTER_GROUPS = {"node front", "frontend"}  # of processes that route and compute nothing
STEPS = "steps.jsonl"  # where Dynamo's recorder writes the mockers' forward passes

Servers = Mapping[str, tuple[Peer, int]]
"""What is compared, by its title: a server, and on how many engines."""


@define
class Figures:
    """The figures of one server, one value a round."""

    hit_share: list[float] = field(factory=list)
    ttft_p50_ms: list[float] = field(factory=list)
    ttft_p99_ms: list[float] = field(factory=list)
    tokens_s: list[float] = field(factory=list)
    cpu_ms: list[float] = field(factory=list)  # of the router's processes, a request
    decision_us: list[float] = field(factory=list)  # by the server's own metric; Dynamo has none in turn
    equal: float = 0.0  # requests of which as much was found as the router had predicted
    predicted: float = 0.0

    def add(self, records: Sequence[Record], cached: float, prompts: float) -> None:
        """Add a round: its answers, and how many of the prompt tokens were found in a cache."""
        first = measure.latencies(records)["ttft"]
        self.hit_share.append(cached / prompts)
        self.ttft_p50_ms.append(first.p50 or 0.0)
        self.ttft_p99_ms.append(first.p99 or 0.0)
        self.tokens_s.append(measure.rates(records, measure.window(records))["output_tokens_per_s"])

    def cells(self) -> list[Cell]:
        """Return the cells of a row below `COLUMNS`."""
        equal = 100 * self.equal / self.predicted if self.predicted else None
        shares = [100 * share for share in self.hit_share]
        return [shares, self.ttft_p50_ms, self.ttft_p99_ms, self.tokens_s, self.cpu_ms, self.decision_us, equal]

    def words(self) -> str:
        """Return the medians in a few words."""
        share, p50, p99 = map(statistics.median, (self.hit_share, self.ttft_p50_ms, self.ttft_p99_ms))
        rate = statistics.median(self.tokens_s)
        return f"{100 * share:.1f} % cached, TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms, {rate:.0f} tokens/s"


COLUMNS = (
    "cached, %",
    "TTFT p50, ms",
    "p99, ms",
    "tokens/s",
    "CPU of the router a request, ms",
    "a choice, us",
    "predicted, %",
)


def cpu_s(running: Running) -> float | None:
    """Return the CPU time of the processes that route, None where they also have engines."""
    accounts = [each for each in take(running.root_pids).values() if each.group in ROUTER_GROUPS]
    return sum(each.usage.cpu_s for each in accounts) if accounts else None


def decisions(text: str) -> tuple[float, float]:
    """Return the time that decisions took by a server's metrics, in microseconds, and their number."""
    mine, other = "espalier_routing_decision_seconds", "dynamo_router_overhead_total_ms"
    spent_us = 1e6 * metric(text, f"{mine}_sum") + 1e3 * metric(text, f"{other}_sum")
    return spent_us, metric(text, f"{mine}_count") + metric(text, f"{other}_count")


def steps(running: Running) -> list[dict[str, Any]]:
    """Return the mockers' forward passes so far; of other engines there are none."""
    file = running.setup.folder / STEPS
    whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [json.loads(line)["metrics"] for line in whole]


def prompt_tokens(running: Running) -> tuple[float, float]:
    """Return the prompt tokens that were found in a cache so far, and all of them."""
    if "recorder" not in running.roots:
        text = running.metrics()
        return metric(text, "espalier_tokens_total", kind="cached"), metric(text, "espalier_tokens_total", kind="input")
    scheduled = [step["scheduled_requests"] for step in steps(running)]
    cached = sum(each["sum_prefill_kv_tokens"] for each in scheduled)
    return cached, cached + sum(each["sum_prefill_tokens"] for each in scheduled)


@contextmanager
def server(peer: Peer, engines: int, share: int, load: Load) -> Iterator[Running]:
    """Run a server with so many engines, each with the memory and slots of `share` engines of the load."""

    def all_up() -> bool:
        if "recorder" in running.roots:
            return len({step["worker_id"] for step in steps(running)}) >= engines
        return metric(running.metrics(), "espalier_engine_up") >= engines

    with short_folder() as folder:
        setup = Setup(
            folder=folder,
            port=free_port(),
            slots=SLOTS * share,
            workers=engines,
            kv_tokens_max=load.kv_tokens * share,
            step_s=STEP_S,
        )
        with started(peer, setup) as running:
            if wait_until(all_up, READY_WITHIN_S, every_s=0.2) is None:
                raise RuntimeError(f"{peer.title}: fewer than {engines} engines")
            time.sleep(SETTLED_S)
            yield running


def send(url: str, load: Load) -> list[Record]:
    """Send a load once; raises `Failed` if a request fails. Every answer has its full length."""
    target = Target(url=url, api="chat", model=MODEL, ignore_eos=True, reuse=False)
    workload = Workload(requests=load.requests)
    return run_to_end([Job(target=target, workload=workload, pace=Pace(clients=load.clients))]).records


def add_round(running: Running, load: Load, figures: Figures) -> None:
    """Send a load once to a fresh server, and add its figures."""
    before_s = cpu_s(running)
    records = send(running.url, load)
    time.sleep(SETTLED_S)
    (cached, every), text, after_s = prompt_tokens(running), running.metrics(), cpu_s(running)
    prompts = sum(record.prompt_tokens or 0 for record in records)
    if every != prompts:
        raise RuntimeError(f"the engines have read {every} prompt tokens, answers have {prompts}")
    figures.add(records, cached, every)
    if before_s is not None and after_s is not None:
        figures.cpu_ms.append(1000 * (after_s - before_s) / len(records))
    spent_us, choices = decisions(text)
    figures.decision_us += [spent_us / choices] if choices else []
    figures.equal += metric(text, "espalier_routing_predictions_total", outcome="equal")
    figures.predicted += metric(text, "espalier_routing_predictions_total")


def compare(name: str, servers: Servers, rounds: Sequence[Load], count: int) -> dict[str, Figures]:
    """Send each round's load, which is for `count` engines, to every server; print the figures and return them."""
    found = {title: Figures() for title in servers}
    for number, load in enumerate(rounds):
        for title in servers if number % 2 == 0 else reversed(list(servers)):
            peer, engines = servers[title]
            with server(peer, engines, count // engines, load) as running:
                add_round(running, load, found[title])
            print(f"{name} {title} round {number}: {found[title].words()}", file=sys.stderr, flush=True)
    rows = [[title, *figures.cells()] for title, figures in found.items()]
    print(table_text(Table(title=f"{name}, {len(rounds)} rounds", columns=("", *COLUMNS), rows=rows)), end="\n\n")
    return found


def add_arguments(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the arguments that benches of routing share."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="a factor for the number of requests")
    parser.add_argument("--loads", nargs="*", choices=NAMES, default=list(default))
