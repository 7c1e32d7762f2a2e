"""`python -m bench figures`: write the figures and plots of docs/performance.md from the kept results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.figures.kept import RESULTS, read_all
from bench.figures.pages import NoMarks, pages
from bench.figures.routing_data import ROUTING, read
from bench.rig.node import ROOT

DESCRIPTION = """\
Write the tables of targets and figures in docs/performance.md, between their marks, and draw the plots in docs/plots/,
from the documents in bench/results/. A new result is taken over by copying it there from build/bench/."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="default: bench/results")
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="of the pages; default: this checkout"
    )


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the pages, or compare them; a document or a page that cannot be used exits with 2."""
    try:
        wanted = pages(read_all(arguments.results), arguments.root, read(arguments.results / ROUTING))
    except (OSError, msgspec.DecodeError, NoMarks, KeyError) as error:
        parser.error(str(error))
    different = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in different:
        if arguments.check:
            print(
                f"{path} differs from the results in {arguments.results}: run python -m bench figures", file=sys.stderr
            )
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
            print(path)
    return 1 if arguments.check and different else 0
