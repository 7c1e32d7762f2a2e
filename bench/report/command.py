"""`python -m bench report RESULT.json ...`: write the page of the documents of any bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.report.page import page
from bench.rig import result

DESCRIPTION = """\
Write one self-contained HTML page from the JSON documents of any command (--json). Documents of one kind that were
taken at several numbers of clients, or rates, also make curves over them; those at the same number are repetitions."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    parser.add_argument("--title", default="Bench report")


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the page; return 0. A file that cannot be read or written exits with 2."""
    results = []
    for path in arguments.results:
        try:
            results.append(result.read(path))
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"{path}: {error}")
    try:
        arguments.output.write_text(page(results, arguments.title))
    except OSError as error:
        parser.error(f"{arguments.output}: {error.strerror}")
    print(arguments.output)
    return 0
