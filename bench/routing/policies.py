"""The routing policies beside each other, on the same engines and the same load.

Two or three engines have together the memory for all that the load shares, and none has it alone. One engine with all
the memory gets the same load: more than it finds in its cache no routing can find. Reported are, for each policy, the
share of prompt tokens that were found in a cache, the times to the first token, the throughput, and of how many
requests exactly as much was found as the router had predicted.

`python -m bench.routing.policies` takes some minutes; `--engines simulated` needs no real engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict

from bench.load.measure import rates, window
from bench.routing import loads
from bench.routing.loads import espalier
from bench.routing.rounds import add_arguments, compare, send, server

POLICIES = ("round_robin", "random_two", "least_loaded", "session", "kv")
PACE_SHARE = 0.4  # of what engines chosen in turn answer in a closed loop; with it every policy keeps up
PACE_SCALE = 1 / 3  # of the load that is sent to find it


def pace(options: argparse.Namespace) -> float:
    """Return a suitable rate of arrivals for this machine, in requests a second.

    On an overloaded machine times to the first token and cached shares depend on waiting and evictions instead of
    routing.
    """
    load = loads.load("paced", 0, engines=options.count, scale=PACE_SCALE)
    with server(espalier("round_robin", options.engines), options.count, 1, load) as running:
        records = send(running.url, load)
    answered_s = rates(records, window(records))["requests_per_s"]
    rate = round(PACE_SHARE * answered_s, 2)
    sys.stderr.write(f"{rate} requests a second arrive: {PACE_SHARE:.0%} of {answered_s:.2f} in a closed loop\n")
    return rate


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, loads.NAMES)
    parser.add_argument("--engines", choices=("sglang", "simulated"), default="sglang")
    parser.add_argument("--count", type=int, default=2, help="engines")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures, by load and policy")
    options = parser.parse_args(words)
    servers = {policy: (espalier(policy, options.engines), options.count) for policy in options.policies}
    servers["one engine"] = (espalier("kv", options.engines), 1)
    measured: dict[str, dict[str, object]] = {}
    for name in options.loads:
        seeds = range(options.rounds)
        rounds = [loads.load(name, seed, engines=options.count, scale=options.scale) for seed in seeds]
        if name == "paced":
            rate = pace(options)
            rounds = [load.at_rate(rate, seed) for load, seed in zip(rounds, seeds, strict=True)]
        found = compare(f"{name}, {options.count} engines ({options.engines})", servers, rounds, options.count)
        measured[name] = {policy: asdict(figures) for policy, figures in found.items()}
    if options.json:
        document = {"kind": options.engines, "engines": options.count, "rounds": options.rounds, "loads": measured}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
