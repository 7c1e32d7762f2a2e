"""Run many seeds, on all cores: `python -m tests.system.hunt [--cluster | --gateways | --embeddings] [--pictures] [--prefixes] [--operations] [--planned] [--seeds 2000 | --minutes M] [--only SEED]`.

A seed is one run of a node with everything in it or, with `--cluster`, of several nodes and the links between them;
with `--gateways`, two of these nodes are gateways that share a port; with `--embeddings`, it is a model of vectors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from multiprocessing import Pool

from attrs import frozen

from actors.kit.groups import first_leaf
from tests.rig import certificate
from tests.system.simulator import pictured, prefix_plan, programs
from tests.system.simulator.cluster_seed import run_cluster_seed
from tests.system.simulator.embedded import run_embedding_seed
from tests.system.simulator.seed import run_seed
from tests.system.simulator.two_gateways import run_gateways_seed

RUNNERS = {  # by the option
    "": run_seed,
    "cluster": run_cluster_seed,
    "gateways": run_gateways_seed,
    "embeddings": run_embedding_seed,
}
FORCED = {
    "pictures": (pictured.SHARES, "sighted"),
    "prefixes": (prefix_plan.SHARES, "prefixes"),
    "operations": (programs.SHARES, "operated"),
}
ON_ALL_CORES_AT_ONCE = 10  # seeds that a process takes at a time
BATCH = 200  # new seeds between two looks at the clock


@frozen
class Seeds:
    """What a hunt lets each of its seeds be."""

    kind: str = ""  # a word in `RUNNERS`
    forced: Sequence[str] = ()  # words in `FORCED`
    planned: bool = False

    def run(self, seed: int) -> str:
        """Run one seed; return its trace."""
        force(self.forced)
        return RUNNERS[self.kind].__wrapped__(seed, planned=self.planned)  # without its cache

    def replay(self, seed: int) -> str:
        """Return the line that runs one seed again."""
        words = [self.kind] * bool(self.kind) + [*self.forced] + ["planned"] * self.planned
        return f"seed {seed}: python -m tests.system.hunt{''.join(f' --{word}' for word in words)} --only {seed}"


def one(seed: int, *, seeds: Seeds) -> tuple[int, str | None]:
    """Run one seed, and return it with the error that it raised, if any."""
    try:
        seeds.run(seed)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is what we hunt
        return seed, _first(error)
    return seed, None


def _first(error: BaseException) -> str:
    """Return the first of what a group was raised for, in one line."""
    leaf = first_leaf(error)
    return " ".join(f"{type(leaf).__name__}: {leaf}".split())[:200]


def force(forced: Sequence[str]) -> None:
    """Let every seed have what some of them have, by the words in `FORCED`."""
    for word in forced:
        shares, name = FORCED[word]
        shares[name] = 1.0


def new_seeds(minutes: float) -> Iterator[range]:
    """Yield seeds that no earlier hunt had, in batches, until that many minutes are over."""
    first, end = int(time.time()), time.perf_counter() + 60 * minutes
    while time.perf_counter() < end:
        yield range(first, first + BATCH)
        first += BATCH


def hunt(batches: Iterable[range], processes: int | None, seeds: Seeds) -> int:
    """Run batches of seeds, print a line for each seed that fails, and return the number of these."""
    certificate.files()  # else each process would write its own to the folder that they share
    begun, run, failed = time.perf_counter(), 0, 0
    with Pool(processes) as pool:
        for batch in batches:
            for seed, error in pool.imap_unordered(partial(one, seeds=seeds), batch, ON_ALL_CORES_AT_ONCE):
                run += 1
                if error is not None:
                    failed += 1
                    print(f"{seeds.replay(seed)}  # {error}", flush=True)  # noqa: T201
    took_s = time.perf_counter() - begun
    print(f"{run} seeds in {took_s:.0f} s, {run / took_s:.0f} a second, {failed} failed")  # noqa: T201
    return failed


def only(seed: int, seeds: Seeds) -> int:
    """Run one seed and print what happened in it, up to its end or its failure."""
    try:
        print(seeds.run(seed))  # noqa: T201
    except BaseException as error:  # noqa: BLE001
        traceback.print_exception(error)
        return 1
    return 0


def main() -> int:
    """Hunt; the exit status says whether a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--minutes", type=float, help="run seeds that no earlier hunt had, for so long")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    kinds = parser.add_mutually_exclusive_group()
    for kind, about in (
        ("cluster", "several nodes and the links between them"),
        ("gateways", "the same with two gateways"),
        ("embeddings", "a model of vectors, its askers, and its embedders on several nodes"),
    ):
        kinds.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="", help=f"run {about}")
    parser.add_argument("--traces", action="store_true", help="print what happened in each, in order, on one core")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    for word, about in (
        ("pictures", "let the model of every seed take images and videos"),
        ("prefixes", "let every seed route by prefix"),
        ("operations", "let operators have the engines of every seed carry out operations"),
    ):
        parser.add_argument(f"--{word}", dest="forced", action="append_const", const=word, help=about)
    parser.add_argument("--planned", action="store_true", help="deal faults to the seeds in turn, as the tests do")
    options = parser.parse_args()
    seeds = Seeds(options.kind, options.forced or (), options.planned)
    numbers = range(options.first, options.first + options.seeds)
    if options.only is not None:
        return only(options.only, seeds)
    if options.traces:
        return max(only(seed, seeds) for seed in numbers)
    batches = [numbers] if options.minutes is None else new_seeds(options.minutes)
    return min(hunt(batches, options.processes, seeds), 1)


if __name__ == "__main__":
    sys.exit(main())
