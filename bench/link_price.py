"""The CPU time of a token over a link, compared with one within a node, in microseconds.

The same load is sent in alternation to one node with a simulated engine, and to a front whose engine is on a second
node of this machine. Both figures contain the engine's simulation. So the cost of the link, at both ends, is what the
two processes use more than the one. Each figure contains the request's share of its tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from bench.cost.accounts import Spent
from bench.cost.sample import Load, Sample, measure_load
from bench.peers.peer import Setup
from bench.peers.running import Running, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder
from bench.versus.ratios import Pair

STEP_S = 0.02  # 50 tokens a second for each stream


def sample(server: Running, load: Load, seed: int) -> Sample:
    """Return the sample of one load."""
    return measure_load(load, url=server.url, model=server.model, roots=server.root_pids, seed=seed)


def us_a_token(spent: Spent, sample: Sample) -> float:
    """Return the CPU time of a token, in microseconds."""
    return 1e6 * spent.cpu_s / sample.tokens


def row(name: str, taken: Sequence[float]) -> None:
    """Print the figures of one process, or of several together."""
    print(f"{name:<34}{statistics.median(taken):>8.1f}{min(taken):>8.1f}{max(taken):>8.1f}")


def main() -> int:
    """Print the CPU times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=250)
    arguments = parser.parse_args()
    streams, tokens = arguments.streams, arguments.tokens
    load = Load(clients=streams, output_tokens=tokens, requests=streams)
    pairs: list[Pair] = []
    with short_folder() as folder:
        one, two = (Setup(folder=folder / name, port=free_port(), slots=streams, step_s=STEP_S) for name in ("1", "2"))
        with (
            started(SERVERS["espalier-simulated-node"], one) as single,
            started(SERVERS["espalier-simulated"], two) as cluster,
        ):
            pairs.extend(
                Pair(sample(single, load, seed), sample(cluster, load, seed)) for seed in range(arguments.rounds)
            )
    within = [us_a_token(pair.theirs.groups["node"], pair.theirs) for pair in pairs]
    front, engine = (
        [us_a_token(pair.ours.groups[name], pair.ours) for pair in pairs] for name in ("node front", "node worker-0")
    )
    across = [sum(both) for both in zip(front, engine, strict=True)]
    print(f"CPU us a token, {streams} streams of {tokens} tokens, {arguments.rounds} rounds in alternation")
    print(f"{'':<34}{'median':>8}{'min':>8}{'max':>8}")
    row("one node, with the engine", within)
    row("two nodes: the front", front)
    row("two nodes: the engine's", engine)
    row("two nodes together", across)
    row("the link, both its ends", [both - alone for both, alone in zip(across, within, strict=True)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
