"""The runner of fault scenarios: it runs the parts of one, prints one table, and lists what was wrong."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from attrs import define, field, frozen

from bench.rig import result
from bench.rig.node import short_folder
from bench.rig.result import Cell, Table
from bench.rig.table_text import table_text

WRONG_SHOWN = 20  # of the sentences about what was wrong; the document has all
Part = Callable[["Run"], None]


@frozen
class Scenario:
    """One row of the table: the measurement, its columns, and its options with their defaults."""

    summary: str
    measure: Part
    columns: Sequence[str]
    options: Mapping[str, tuple[object, str]] = field(factory=dict)
    note: str = ""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser, each with the type of its default; a tuple lists the choices."""
        for name, (default, text) in self.options.items():
            match default:
                case bool():
                    parser.add_argument(f"--{name}", action="store_true", help=text)
                case tuple():
                    parser.add_argument(f"--{name}", choices=default, default=default[0], help=text)
                case list():
                    parser.add_argument(f"--{name}", nargs="+", default=default, help=f"{text}; {' '.join(default)}")
                case _:
                    parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text}; {default}")
        parser.add_argument("--only", default="", metavar="WORDS", help="the parts whose names have these words")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as one document")


@define
class Run:
    """One run of a scenario: its options, the folder of the part that runs, and the results so far."""

    options: argparse.Namespace
    folder: Path = Path()
    rows: list[Sequence[Cell]] = field(factory=list)
    notes: list[str] = field(factory=list)
    wrong: list[str] = field(factory=list)

    def row(self, *cells: Cell) -> None:
        """Add one row to the table."""
        self.rows.append(cells)
        print(*cells, sep="  ", file=sys.stderr, flush=True)

    def check(self, holds: object, sentence: str) -> None:
        """Add a sentence to what is wrong unless a condition holds."""
        if not holds:
            self.wrong.append(sentence)

    def chosen(self, names: Mapping[str, object]) -> list[str]:
        """Return the names that were chosen."""
        return [name for name in names if self.options.only in name]

    def each(self, parts: Mapping[str, Part]) -> None:
        """Run the chosen parts, each in a folder of its own."""
        for name in self.chosen(parts):
            self.attempt(name, parts[name])

    def attempt(self, name: str, part: Part) -> None:
        """Run one part in a folder of its own; an error is added to what is wrong."""
        try:
            with short_folder() as self.folder:
                part(self)
        except Exception as error:  # noqa: BLE001  # other parts still run
            traceback.print_exc()
            self.wrong.append(f"{name}: {error!r}"[:2000])


def check(holds: object, sentence: str) -> None:
    """Raise `AssertionError` with a sentence unless a condition holds."""
    if not holds:
        raise AssertionError(sentence)


def run(name: str, scenario: Scenario, options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run a scenario, print its table, and return 1 if a promise was broken or nothing was measured."""
    begun, done = datetime.now(UTC), Run(options)
    done.attempt(name, scenario.measure)
    done.check(done.rows, "nothing was measured")
    table = Table(title=scenario.summary, columns=scenario.columns, rows=done.rows, note=scenario.note)
    print(table_text(table), *filter(None, (scenario.note, *done.notes)), sep="\n")
    for sentence in done.wrong[:WRONG_SHOWN]:
        print(f"WRONG: {sentence}")
    print(f"{name}: {len(done.rows)} rows, {len(done.wrong)} wrong")
    if options.json is not None:
        about = result.about((name, *words), begun) | {"command": ["python", "-m", "bench.faults", name, *words]}
        document = {"schema": f"espalier.bench.{name}/1", "title": scenario.summary, **about, "wrong": done.wrong}
        result.write(options.json, document | {"notes": done.notes, "figures": [table]})
    return 1 if done.wrong else 0
