"""Fuzz the gateway: `python -m tests.system.fuzz [--inputs 200000] [--first 0] [--seed 0] [--only N] [--processes 2]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from functools import partial
from multiprocessing import Pool

from tests.system.fuzz.run import SHARE, run


def fuzz(numbers: range, seed: int, processes: int) -> int:
    """Play all of them, tell each problem in one line, and return how many there were."""
    begun, problems, counts = time.perf_counter(), 0, Counter[str]()
    shares = [numbers[at : at + SHARE] for at in range(0, len(numbers), SHARE)]
    with Pool(processes) as pool:
        for report in pool.imap(partial(run, seed=seed), shares):
            counts += report.counts
            problems += len(report.problems)
            for problem in report.problems:
                print(problem, flush=True)  # noqa: T201
    took_s = time.perf_counter() - begun
    print(*(f"{kind}: {count}" for kind, count in sorted(counts.items())), sep="\n")  # noqa: T201
    print(f"{len(numbers)} inputs in {took_s:.0f} s, {len(numbers) / took_s:.0f} a second, {problems} problems")  # noqa: T201
    return problems


def main() -> int:
    """Attack; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play one input alone, and show it")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.only is not None:
        report = run([options.only], options.seed, show=True)
        print(*report.problems, sep="\n")  # noqa: T201
        return min(len(report.problems), 1)
    return min(fuzz(range(options.first, options.first + options.inputs), options.seed, options.processes), 1)


if __name__ == "__main__":
    sys.exit(main())
