"""`python -m bench cost`: start a server several times, or take a running one, and print its cost of a token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from attrs import asdict, frozen

from bench.cost import options, report, trends
from bench.cost.sample import Sample, measure_load
from bench.load.process import Failed
from bench.load.values import count
from bench.peers.running import NotStarted, started
from bench.peers.table import SERVERS
from bench.rig.node import short_folder
from bench.rig.processes import process_entry
from bench.rig.result import write_document
from bench.rig.table_text import tables_text

DESCRIPTION = """\
Measure the CPU time, context switches and memory of a server's processes for a token and for a request, in groups by
their part in it, the engine's scheduler apart. Either a server that this command starts (--server), several times,
since a server differs from start to start; or one that runs (--pid, --url, --model)."""


@frozen
class Measured:
    """A running server, and the roots of its process trees."""

    url: str
    model: str
    roots: Sequence[int]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    server = parser.add_argument_group("server")
    which = server.add_mutually_exclusive_group()
    which.add_argument("--server", choices=SERVERS, default="espalier", help="start it; default: espalier")
    which.add_argument("--pid", nargs="+", type=int, help="processes of a server that runs: the first of each family")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="with --pid: where it listens")
    server.add_argument("--model", default="tiny", help="with --pid: what it serves")
    often = parser.add_argument_group("how often")
    often.add_argument("--starts", type=count, default=3, help="of the server; default: 3")
    options.add(parser, clients=(64,), apis=("chat",))


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, print tables, and return 1 if the server did not start or answer."""
    if arguments.pid is not None and any(process_entry(pid) is None for pid in arguments.pid):
        parser.error(f"--pid: there is no process {next(p for p in arguments.pid if process_entry(p) is None)}")
    if arguments.pid is None and (unknown := set(arguments.apis) - set(SERVERS[arguments.server].apis)):
        parser.error(f"--apis: {arguments.server} has no {', '.join(sorted(unknown))}")
    begun = datetime.now(UTC)
    title = f"processes {arguments.pid}" if arguments.pid is not None else SERVERS[arguments.server].title
    try:
        samples = list(measure(arguments))
    except (Failed, NotStarted) as error:
        print(f"bench cost: {error}", file=sys.stderr)
        return 1
    tables = [
        *report.tables(title, samples),
        *trends.split_tables(title, samples),
        *trends.memory_tables(title, samples),
    ]
    notes = report.warnings(samples)
    print(tables_text(tables), "", *notes, sep="\n")
    if arguments.json is not None:
        write_document(
            arguments.json,
            ("cost", *words),
            begun,
            title=f"The price of a token: {title}",
            notes=notes,
            figures=tables,
            samples=[asdict(sample) for sample in samples],
        )
    return 0


def measure(arguments: argparse.Namespace) -> Iterator[Sample]:
    """Yield the sample of each load and start."""
    starts = 1 if arguments.pid is not None else arguments.starts
    for start in range(starts):
        with short_folder() as folder, _server(arguments, folder) as server:
            for load, seed in options.seeded_loads(arguments, start):
                sample = measure_load(
                    load, url=server.url, model=server.model, roots=server.roots, seed=seed, start=start
                )
                outside, done = 1e6 * sample.outside.cpu_s / sample.tokens, f"start {start + 1} of {starts}"
                print(f"{done}: {options.describe(load)}: {outside:.1f} us a token", file=sys.stderr, flush=True)
                yield sample


@contextmanager
def _server(arguments: argparse.Namespace, folder: Path) -> Iterator[Measured]:
    if arguments.pid is not None:
        yield Measured(arguments.url, arguments.model, arguments.pid)
        return
    with started(SERVERS[arguments.server], options.setup(arguments, folder)) as running:
        yield Measured(running.url, running.model, running.root_pids)
