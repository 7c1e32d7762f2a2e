"""Routing by the product's own code over many workers in virtual time: what a choice costs, and what it finds.

Requests share beginnings, of which all workers together have the memory and none has it alone. Reported are the time of
a choice, the share of prompt tokens found in a cache, the times to the first token in virtual time, how often the
prediction was right, and the share of the worker that got most.

`python -m tests.system.routing_scale` takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from random import Random

import trio
from attrs import define, field, frozen
from trio.testing import MockClock

from actors.routing.policies.kv.policy import KvSettings
from supervisor.node import garbage
from tests.system.virtual_workers import TOLD_S, Figures, Gateway, Prompt, Speeds, VirtualWorker


@frozen(kw_only=True)
class Run:
    """One run: its cluster and its load."""

    workers: int
    policy: str = "kv"
    settings: KvSettings = KvSettings()
    gateways: int = 1
    requests: int = 1000
    clients: int = 0  # for each worker, one request after the other
    prefixes: int = 8  # for each worker
    prefix_pages: int = 224
    own_pages: int = 32
    answer: int = 20
    slots: int = 16
    memory: float = 1.3  # of all beginnings, that all workers have together
    skew: float = 0.0  # of the beginnings' popularity, as Zipf's exponent
    seed: int = 1


MANY = {"clients": 3, "prefixes": 2, "memory": 1.8, "settings": {"blocks_max": 4_000_000}}
RUNS = [
    *(json.dumps({"workers": workers, "requests": 100 * workers, **MANY}) for workers in (10, 100, 1000)),
    *(json.dumps({"workers": 8, "requests": 2000, "clients": 3, "gateways": number}) for number in (1, 2, 4)),
]


@define(eq=False)
class Cluster:
    """The workers, gateways and clients of a run."""

    run: Run
    chance: Random = field(init=False)
    workers: list[VirtualWorker] = field(init=False)
    gateways: list[Gateway] = field(init=False)
    beginnings: list[tuple[int, ...]] = field(init=False)
    popular: list[float] = field(init=False)  # the weights of the beginnings, summed up
    figures: Figures = field(factory=Figures)
    left: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        run = self.run
        self.chance, self.left = Random(run.seed), run.requests
        pages = int(run.memory * run.prefixes * run.prefix_pages)
        self.workers = [VirtualWorker(f"w{number:04d}", run.slots, pages, Speeds()) for number in range(run.workers)]
        self.gateways = [
            Gateway(number, run.policy, run.settings, self.workers, Random(run.seed + number))
            for number in range(run.gateways)
        ]
        for worker in self.workers:
            worker.connect(self.gateways)
        for gateway in self.gateways:
            gateway.begin()
        number = run.workers * run.prefixes
        self.beginnings = [self._blocks(run.prefix_pages) for _ in range(number)]
        self.popular = list(accumulate((place + 1) ** -run.skew for place in range(number)))

    def _blocks(self, number: int) -> tuple[int, ...]:
        return tuple(self.chance.getrandbits(62) for _ in range(number))

    def prompt(self) -> Prompt:
        """Draw a prompt."""
        own = self._blocks(self.chance.randint(1, 2 * self.run.own_pages))
        (beginning,) = self.chance.choices(self.beginnings, cum_weights=self.popular)
        return Prompt(beginning + own, self.chance.randint(1, 2 * self.run.answer))

    async def client(self, number: int) -> None:
        """Send one request after the other."""
        gateway = self.gateways[number % len(self.gateways)]
        while self.left > 0:
            self.left -= 1
            await gateway.answer(self.prompt(), self.figures)

    async def announce(self) -> None:
        """Tell the gateways the loads of the workers, until cancelled."""
        while True:
            await trio.sleep(TOLD_S)
            for worker in self.workers:
                worker.tell()

    async def serve(self) -> None:
        """Serve all requests of the run."""
        async with trio.open_nursery() as nursery:
            if len(self.gateways) > 1:
                nursery.start_soon(self.announce)
            async with trio.open_nursery() as clients:
                for number in range(self.run.workers * self.run.clients):
                    clients.start_soon(self.client, number)
            nursery.cancel_scope.cancel(reason="all requests are answered")


async def measure(run: Run) -> dict[str, float]:
    """Return the figures of a run."""
    cluster, began = Cluster(run), time.perf_counter()
    await cluster.serve()
    figures, lasted_s = cluster.figures, trio.current_time()
    decisions = sorted(each for gateway in cluster.gateways for each in gateway.decisions_s)
    ttft = sorted(figures.ttft_s)
    return {
        "cached": figures.cached / figures.tokens,
        "right": figures.right / figures.requests,
        "within_a_page": 1 - figures.wrong_by_pages / figures.requests,
        "ttft_p50_ms": 1000 * ttft[len(ttft) // 2],
        "ttft_p99_ms": 1000 * ttft[len(ttft) * 99 // 100],
        "decision_us": 1e6 * statistics.mean(decisions),
        "decision_p50_us": 1e6 * decisions[len(decisions) // 2],
        "decision_p99_us": 1e6 * decisions[len(decisions) * 99 // 100],
        "most_shares": max(each.served for each in cluster.workers) * run.workers / figures.requests,
        "requests_s": figures.requests / lasted_s,
        "index_blocks": cluster.gateways[0].index.statistics().blocks,
        "told_blocks_s": cluster.gateways[0].told_blocks / lasted_s,
        "cpu_s": time.perf_counter() - began,
    }


def main(words: Sequence[str]) -> None:
    """Print the figures, one line a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=RUNS, help="each a JSON object of the fields of Run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    garbage.prepare()  # as in a node; here the caches of all workers are in the heap, too
    results = []
    for text in options.runs:
        fields = json.loads(text)
        fields["settings"] = KvSettings(**fields.get("settings", {}))
        figures = trio.run(measure, Run(**fields), clock=MockClock(autojump_threshold=0))
        results.append({"run": json.loads(text), "figures": figures})
        sys.stdout.write(text + "\n  " + "  ".join(f"{name} {value:.3g}" for name, value in figures.items()) + "\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
