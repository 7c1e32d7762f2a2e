"""The routing policies beside each other, on the same engines and the same load, one after the other in turns.

Two or three engines have together the memory for all that the load shares, and none has it alone. For each policy in
turn a node is started anew, and the load is sent. One engine with all the memory gets the same load: more than it finds
in its cache no routing can find. Reported are, for each policy, the share
of prompt tokens that were found in a cache, the times to the first token, the throughput, and of how many requests
exactly as much was found as the router had predicted.

`python -m bench.routing.policies` takes some minutes; `--engines simulated` needs no real engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import asdict, define

from bench.load.measure import rates, window
from bench.peers.peer import Engine, Setup
from bench.peers.running import Running, started
from bench.rig.node import free_port, metric, short_folder, wait_until
from bench.rig.result import Cell, Table
from bench.rig.table_text import table_text
from bench.routing import loads
from bench.routing.loads import Figures, Load

POLICIES = ("round_robin", "random_two", "least_loaded", "session", "kv")
REFERENCE = "one engine"
SLOTS = 8
SETTLED_S = 1.0  # after a reload or a load
PACE_SHARE = 0.4  # of what engines chosen in turn answer in a closed loop; with it every policy keeps up
PACE_SCALE = 1 / 3  # of the load that is sent to find it


@define
class PolicyFigures(Figures):
    """The figures of one policy."""

    equal: float = 0.0  # requests of which as much was found as predicted
    predicted: float = 0.0

    def row(self, name: str) -> list[Cell]:
        """Return a row of the table."""
        return [name, *self.cells(), 100 * self.equal / self.predicted if self.predicted else None]


@contextmanager
def server(kind: Engine, policy: str, engines: int, kv_tokens: int, slots: int = SLOTS) -> Iterator[Running]:
    """Run a node with so many engines, each with so much KV memory, and end it whatever happens."""
    with short_folder() as folder:
        setup = Setup(folder=folder, port=free_port(), slots=slots, workers=engines, kv_tokens_max=kv_tokens)
        with started(loads.espalier(policy, kind), setup) as running:
            wait_until(lambda: metric(running.metrics(), "espalier_engine_up") >= engines, 120.0, every_s=0.2)
            time.sleep(SETTLED_S)
            yield running


def measure(running: Running, load: Load, figures: PolicyFigures) -> None:
    """Send a load once to a server that has answered nothing yet, and add what came of it."""
    records = loads.send(running.url, load)
    time.sleep(SETTLED_S)
    text, predictions = running.metrics(), "espalier_routing_predictions_total"
    cached, prompts = (metric(text, "espalier_tokens_total", kind=kind) for kind in ("cached", "input"))
    figures.add(records, cached, prompts)
    figures.equal += metric(text, predictions, outcome="equal")
    figures.predicted += metric(text, predictions)


def pace(options: argparse.Namespace, kv_tokens: int) -> float:
    """Return the rate of arrivals that suits this machine, in requests a second.

    A rate that one machine keeps up with overloads another, and then times to the first token and shares of what is
    cached depend on waiting and evictions instead of routing.
    """
    with server(options.engines, "round_robin", options.count, kv_tokens) as running:
        records = loads.send(running.url, loads.load("paced", 0, engines=options.count, scale=PACE_SCALE))
    answered_s = rates(records, window(records))["requests_per_s"]
    rate = round(PACE_SHARE * answered_s, 2)
    sys.stderr.write(f"{rate} requests a second arrive: {PACE_SHARE:.0%} of {answered_s:.2f} in a closed loop\n")
    return rate


def compare(name: str, options: argparse.Namespace) -> dict[str, PolicyFigures]:
    """Return what each policy reached on a load, and one engine with all the memory."""
    kind, count = options.engines, options.count
    rounds = [loads.load(name, seed, engines=count, scale=options.scale) for seed in range(options.rounds)]
    kv_tokens = rounds[0].kv_tokens
    if name == "paced":
        rate = pace(options, kv_tokens)
        rounds = [load.at_rate(rate, seed) for seed, load in enumerate(rounds)]
    table = {policy: PolicyFigures() for policy in (*options.policies, REFERENCE)}
    for number, load in enumerate(rounds):
        for policy in list(table) if number % 2 == 0 else reversed(table):
            alone = policy == REFERENCE
            engines, share = (1, count) if alone else (count, 1)
            with server(kind, "kv" if alone else policy, engines, share * kv_tokens, share * SLOTS) as running:
                measure(running, load, table[policy])
            sys.stderr.write(f"{name} {policy} round {number}: {table[policy].words()}\n")
    return table


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    loads.add_arguments(parser, loads.NAMES)
    parser.add_argument("--engines", choices=("sglang", "simulated"), default="sglang")
    parser.add_argument("--count", type=int, default=2, help="engines")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures, by load and policy")
    options = parser.parse_args(words)
    measured: dict[str, dict[str, object]] = {}
    for name in options.loads:
        table = compare(name, options)
        title = f"{name}: {options.count} engines ({options.engines}), {options.rounds} rounds"
        rows = [figures.row(policy) for policy, figures in table.items()]
        print(table_text(Table(title=title, columns=("", *loads.COLUMNS, "predicted, %"), rows=rows)), end="\n\n")
        measured[name] = {policy: asdict(figures) for policy, figures in table.items()}
    if options.json:
        document = {"kind": options.engines, "engines": options.count, "rounds": options.rounds, "loads": measured}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
