"""`python -m bench report RESULT.json ...`: print the documents of any bench as one page of Markdown."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.report import summary
from bench.rig import result
from bench.rig.result import Result
from bench.rig.table_text import tables_text

DESCRIPTION = """\
Print the JSON documents of any command (--json) as one page of Markdown, behind a table of the targets that they have
figures of."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    words = "take the targets over into bench/results/summary.json and docs/performance.md"
    parser.add_argument("--keep", action="store_true", help=words)


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the page; return 0. A file that cannot be read exits with 2."""
    results: dict[str, Result] = {}
    for path in arguments.results:
        try:
            results[path.stem] = result.read(path)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"{path}: {error}")
    entries = [each for name, found in results.items() if (each := summary.entry(name, found)) is not None]
    if entries:
        print("# Targets", "", summary.targets(entries), "", sep="\n")
    for found in results.values():
        print(*section(found), sep="\n")
    if arguments.keep:
        new = {each.name: each for each in entries}
        kept = [new.pop(each.name, each) for each in summary.read()] + [*new.values()]
        summary.FILE.write_text(summary.text(kept))
        summary.PAGE.write_text(summary.replaced(summary.PAGE.read_text(), summary.targets(kept)))
    return 0


def section(found: Result) -> list[str]:
    """Return the lines of one document: where its figures come from, its tables, and what to doubt."""
    facts = [*found.machine.items(), *found.versions.items()]
    origin = ", ".join([found.begun_at, *(f"{name} {value}" for name, value in facts if value is not None)])
    head = [f"# {found.title}", "", origin, "", f"    {shlex.join(found.command)}", ""]
    notes = [f"- {note}" for note in dict.fromkeys([*found.notes, *(each.note for each in found.figures)]) if note]
    return [*head, "```", tables_text(found.figures), "```", "", *notes, ""]
