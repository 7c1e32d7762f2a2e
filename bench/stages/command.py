"""`python -m bench stages`: print what each stage of a token's and of a request's way costs by itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.rig.result import Table, write_document
from bench.rig.table_text import tables_text
from bench.stages.measure import Stage, measure
from bench.stages.model import subject
from bench.stages.request_stages import request_stages
from bench.stages.token_stages import token_stages

DESCRIPTION = """\
Measure each stage of a token's and of a request's way through this code by itself: CPU time and memory. Hot, in a loop,
so it ranks stages and shows what a change did to one; in a running node each costs several times as much, since caches
are cold there."""
NOTES = (
    "Hot figures: in a running node each stage costs two to five times as much, since caches are cold there.",
    "peak: the most memory above that before the call.",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("--rounds", type=int, default=5, help="of all stages; default: 5")
    parser.add_argument("--calls", type=int, default=2000, help="of each stage in each round; default: 2000")
    parser.add_argument("--only", metavar="WORD", default="", help="stages with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a document")


def stages() -> dict[str, tuple[Stage, ...]]:
    """Return the stages of a token and of a request; a new one is a row in one of these."""
    model = subject()
    return {"token": token_stages(model), "request": request_stages(model)}


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure and print; return 0."""
    if min(arguments.rounds, arguments.calls) < 1:
        parser.error("--rounds and --calls must be at least 1")
    chosen = [(part, each) for part, several in stages().items() for each in several if arguments.only in each.name]
    if not chosen:
        parser.error(f"--only: no stage has {arguments.only!r} in its name")
    begun = datetime.now(UTC)
    costs = measure([stage for _, stage in chosen], rounds=arguments.rounds, calls=arguments.calls)
    rows = [
        (part, (cost.stage.name, cost.us, round(cost.peak_bytes)))
        for (part, _), cost in zip(chosen, costs, strict=True)
    ]
    figures = [
        Table(
            title=f"Stages of a {part}",
            columns=(f"a {part}", "CPU us", "peak bytes"),
            rows=[row for of, row in rows if of == part],
        )
        for part in dict.fromkeys(part for part, _ in rows)
    ]
    print(tables_text(figures), "", *NOTES, sep="\n")
    if arguments.json is not None:
        title = "Stages of a token and of a request"
        write_document(
            arguments.json, ("stages", *words), begun, title=title, notes=NOTES, figures=figures, samples=None
        )
    return 0
