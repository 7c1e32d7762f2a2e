"""Run many seeds of the whole system, on all cores: `python -m tests.hunt [--seeds 5000] [--first 0] [--only SEED]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from multiprocessing import Pool

from tests.test_simulation import run_seed


def one(seed: int) -> tuple[int, str | None]:
    """Run one seed; return it with what it raised, if anything."""
    try:
        run_seed(seed)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is what we hunt
        return seed, "".join(traceback.format_exception(error))
    return seed, None


def main() -> int:
    """Hunt, and return how many seeds failed, at most 1 as an exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.only is not None:
        print(run_seed(options.only))  # noqa: T201
        return 0
    begun, failed = time.perf_counter(), 0
    with Pool(options.processes) as pool:
        for seed, error in pool.imap_unordered(one, range(options.first, options.first + options.seeds), 20):
            if error is not None:
                failed += 1
                print(f"seed {seed} failed:\n{error}", file=sys.stderr)  # noqa: T201
    took = time.perf_counter() - begun
    print(f"{options.seeds} seeds in {took:.0f} s, {options.seeds / took:.0f} a second, {failed} failed")  # noqa: T201
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
