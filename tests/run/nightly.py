"""The parts of the nightly run, and its page of results.

Each part is a word of the Makefile or a command; a part that fails stops none of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.run.outcomes import Result
from tests.run.parts import Part, Stage

HUNT_MINUTES = 2.5
"""The minutes of new seeds for each of the four kinds of simulation."""


def _hunt(name: str, *options: str) -> Part:
    command = (sys.executable, "-m", "tests.system.hunt", "--minutes", str(HUNT_MINUTES), *options)
    return Part(f"hunt-{name}", command)


NIGHTLY = [
    Stage((Part("lint"), Part("types")), at_once=2),
    Stage((Part("coverage"),)),
    Stage((Part("pythons"),)),
    Stage(
        (Part("engines", is_realtime=True), Part("realtime", is_realtime=True), Part("nodes", is_realtime=True)),
        at_once=2,
    ),
    Stage((Part("late", is_realtime=True),)),
    # One after another: each takes all cores, or measures time.
    Stage(
        (
            _hunt("node"),
            _hunt("cluster", "--cluster"),
            _hunt("gateways", "--gateways"),
            _hunt("prefixes", "--prefixes"),
            Part("mutants"),
            Part("docs"),
            Part("templates"),
            *map(Part, ("stages", "abort-times", "soak", "crowd", "siege", "rolling", "endings", "chaos", "attacks")),
        )
    ),
]


def write_page(results: Sequence[Result], folder: Path) -> Path:
    """Write a page with a row for each part, and return its path."""
    rows = [
        f"| {result.part} | {'ok' if result.is_good else '**failed**'} | {result.seconds:.0f} | {last_line(result.log)} |"
        for result in results
    ]
    flaky = [f"- flaky: `{test}`" for result in results for test in result.flaky]
    failed = [f"- failed: `{test}`" for result in results for test in result.failed]
    page = folder / "results.md"
    head = ["# Nightly run", "", "| part | result | seconds | last line of its log |", "|---|---|---|---|"]
    page.write_text("\n".join([*head, *rows, "", *failed, *flaky]) + "\n")
    return page


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty, as a cell of a table."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().replace("|", "\\|")[:160] if lines else ""
