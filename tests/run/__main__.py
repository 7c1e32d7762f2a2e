"""Run the tests and sum them up: `python -m tests.run check`, `test` or `nightly`, which are words of the Makefile.

`check` is the fast part. `test` adds real processes and the real engine. `nightly` runs everything that is too slow or too
rare for a branch, goes on after a failure, and writes a page of results.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.run.nightly import NIGHTLY, write_page
from tests.run.outcomes import summary
from tests.run.parts import ROOT, Part, Stage, run_to_the_end

UNITS, WIDE = Part("units"), Part("wide")
CHECK = Stage((UNITS, WIDE, Part("types"), Part("lint")), at_once=2)  # the longest first, on two cores
# Tests of real engines and processes wait half of their time, in which types and lint are checked.
REAL = Stage(
    (
        Part("engines", is_realtime=True),
        Part("realtime", is_realtime=True),
        Part("types", in_background=True),
        Part("lint", in_background=True),
        Part("nodes", is_realtime=True),
    ),
    at_once=3,
)
RUNS = {"check": [CHECK], "test": [Stage((UNITS, WIDE), at_once=2), REAL], "nightly": NIGHTLY}


def main() -> int:
    """Run what the command line names; the exit status is 0 if all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=RUNS)
    run = parser.parse_args().run
    folder = ROOT / "build" / run
    begun = time.monotonic()
    results = run_to_the_end(RUNS[run], folder)
    if results is None:
        print("interrupted", file=sys.stderr)
        return 130
    if run == "nightly":
        print(f"The results are in {write_page(results, folder)}")
    for line in summary(results, time.monotonic() - begun):
        print(line)
    return int(not all(result.is_good for result in results))


if __name__ == "__main__":
    sys.exit(main())
