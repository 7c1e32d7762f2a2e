"""Run many seeds of the whole system, on all cores: `python -m tests.hunt [--seeds 2000] [--first 0] [--only SEED]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from multiprocessing import Pool

from tests.sim.seed import run_seed

ON_ALL_CORES_AT_ONCE = 10  # seeds that a process takes at a time


def one(seed: int) -> tuple[int, str | None]:
    """Run one seed; return it with what it raised, if anything."""
    try:
        run_seed.__wrapped__(seed)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is what we hunt
        return seed, _first(error)
    return seed, None


def _first(error: BaseException) -> str:
    """Return the first of what a group was raised for, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def hunt(seeds: range, processes: int | None) -> int:
    """Run the seeds, tell of each that fails in one line, and return how many did."""
    begun, failed = time.perf_counter(), 0
    with Pool(processes) as pool:
        for seed, error in pool.imap_unordered(one, seeds, ON_ALL_CORES_AT_ONCE):
            if error is not None:
                failed += 1
                print(f"seed {seed}: python -m tests.hunt --only {seed}  # {error}", flush=True)  # noqa: T201
    took_s = time.perf_counter() - begun
    print(f"{len(seeds)} seeds in {took_s:.0f} s, {len(seeds) / took_s:.0f} a second, {failed} failed")  # noqa: T201
    return failed


def only(seed: int) -> int:
    """Run one seed and print what happened in it, up to its end or its failure."""
    try:
        print(run_seed(seed))  # noqa: T201
    except BaseException as error:  # noqa: BLE001
        traceback.print_exception(error)
        return 1
    return 0


def main() -> int:
    """Hunt; the exit status says whether a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--traces", action="store_true", help="print what happened in each, in order, on one core")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.only is not None:
        return only(options.only)
    if options.traces:
        return max(only(seed) for seed in seeds)
    return min(hunt(seeds, options.processes), 1)


if __name__ == "__main__":
    sys.exit(main())
