"""Run one fault scenario of the table; return 1 if a promise was broken."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from bench import faults
from bench.faults.scenario import run
from bench.faults.table import SCENARIOS
from bench.rig import result


def main(words: Sequence[str]) -> int:
    """Run the scenario of the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=faults.__doc__)
    names = parser.add_subparsers(dest="scenario", required=True)
    for name, scenario in SCENARIOS.items():
        scenario.add_options(names.add_parser(name, help=scenario.summary, description=scenario.summary))
    options = parser.parse_args(words)
    if options.json is not None:
        result.check_writable(options.json)
    result.surroundings()
    return run(options.scenario, SCENARIOS[options.scenario], options, words[1:])


if __name__ == "__main__":
    # As Ctrl-C does: what a scenario has started ends with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
