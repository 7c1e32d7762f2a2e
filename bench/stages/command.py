"""`python -m bench stages`: print what each stage of a token's and of a request's way costs by itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.rig.result import Cell, Table, write_document
from bench.rig.table_text import tables_text
from bench.stages.measure import AnyStage, Cost, Part, measure
from bench.stages.model import TINY, Subject, subject
from bench.stages.request_stages import request_stages
from bench.stages.task_stages import task_stages
from bench.stages.token_stages import token_stages

DESCRIPTION = """\
Measure each stage of a token's and of a request's way through this code by itself: CPU time and memory. Hot, in a loop,
so it ranks stages and shows what a change did to one; in a running node each costs several times as much, since caches
are cold there."""
NOTES = (
    "Hot figures: in a running node each stage costs two to five times as much, since caches are cold there.",
    "peak: the most memory above that before the call. kept: what is left with the result and in the stage itself.",
)
COLUMNS = ("CPU us", "peak bytes", "kept bytes", "kept blocks")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("--rounds", type=int, default=5, help="of all stages; default: 5")
    parser.add_argument("--calls", type=int, default=2000, help="of each stage in each round; default: 2000")
    parser.add_argument("--only", metavar="WORD", default="", help="stages with this word in their name")
    parser.add_argument("--model-folder", type=Path, default=TINY, help="default: examples/tiny")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a document")


def stages(of: Subject) -> list[AnyStage]:
    """Return all stages; a new one is a row in one of these."""
    return [*token_stages(of), *request_stages(of), *task_stages()]


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure and print; return 0."""
    if min(arguments.rounds, arguments.calls) < 1:
        parser.error("--rounds and --calls must be at least 1")
    chosen = [stage for stage in stages(subject(arguments.model_folder)) if arguments.only in stage.name]
    if not chosen:
        parser.error(f"--only: no stage has {arguments.only!r} in its name")
    begun = datetime.now(UTC)
    figures = tables(measure(chosen, rounds=arguments.rounds, calls=arguments.calls))
    print(tables_text(figures), "", *NOTES, sep="\n")
    if arguments.json is not None:
        title = "Stages of a token and of a request"
        write_document(
            arguments.json, ("stages", *words), begun, title=title, notes=NOTES, figures=figures, samples=None
        )
    return 0


def tables(costs: Sequence[Cost]) -> list[Table]:
    """Return the figures of each part; a CPU time has the values of all rounds."""
    parts: dict[Part, list[Cost]] = {}
    for cost in costs:
        parts.setdefault(cost.stage.part, []).append(cost)
    return [
        Table(title=f"Stages of a {part}", columns=(f"a {part}", *COLUMNS), rows=[_row(cost) for cost in found])
        for part, found in parts.items()
    ]


def _row(cost: Cost) -> list[Cell]:
    memory = cost.memory
    assert memory is not None
    return [cost.stage.name, cost.us, round(memory.peak_bytes), round(memory.kept_bytes), round(memory.kept_blocks, 1)]
