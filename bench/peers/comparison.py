"""The part that benches of several servers share: their arguments, a fresh start for each server, and their end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

from attrs import AttrsInstance, asdict, evolve

from bench.peers.peer import ENVIRONMENTS, Command, Peer, Setup
from bench.peers.running import NotStarted, Running, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder
from bench.rig.result import Table, write_document
from bench.rig.table_text import table_text


def add(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the arguments: which servers, where their environments are, where the document goes."""
    servers = ", ".join(SERVERS)
    parser.add_argument(
        "--servers",
        nargs="+",
        choices=SERVERS,
        default=list(default),
        metavar="NAME",
        help=f"of {servers}; default: {' '.join(default)}; those that are not installed are named",
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of peers; default: build/peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")


def peers(arguments: argparse.Namespace) -> list[Peer]:
    """Return the servers that were chosen."""
    return [SERVERS[name] for name in arguments.servers]


def with_variables(peer: Peer, **variables: str) -> Peer:
    """Return a server all of whose processes get these variables, too."""

    def commands(setup: Setup) -> list[Command]:
        return [evolve(command, variables={**command.variables, **variables}) for command in peer.commands(setup)]

    return evolve(peer, commands=commands)


@contextmanager
def fresh(peer: Peer, environments: Path, *, slots: int, workers: int = 1) -> Iterator[Running]:
    """Start a server in a folder of its own, and end it; raises `NotStarted`."""
    with short_folder() as folder:
        setup = Setup(folder=folder, port=free_port(), slots=slots, workers=workers, environments=environments)
        with started(peer, setup) as running:
            yield running


class Findings(AttrsInstance, Protocol):
    """The results of one server."""

    @property
    def notes(self) -> Sequence[str]:
        """The sentences that a reader of its figures must know."""


Found = TypeVar("Found", bound=Findings)


def compare(
    arguments: argparse.Namespace,
    words: Sequence[str],
    *,
    several: Sequence[Peer],
    measured: Callable[[Peer, argparse.Namespace], Found],
    title: str,
    tables: Callable[[dict[str, Found]], Sequence[Table]],
) -> int:
    """Measure each server, print the tables and write the document; return 1 if none could be measured."""
    begun = datetime.now(UTC)
    results, notes = _for_each(several, lambda peer: measured(peer, arguments))
    notes += [f"{server}: {note}" for server, findings in results.items() for note in findings.notes]
    figures = tables(results)
    for table in figures:
        print(table_text(table), table.note, sep="\n", end="\n\n")
    print(*notes, sep="\n")
    if arguments.json is not None:
        samples = {server: asdict(findings) for server, findings in results.items()}
        command = (arguments.command, *words)
        write_document(arguments.json, command, begun, title=title, notes=notes, figures=figures, samples=samples)
    return 0 if results else 1


def _for_each(several: Sequence[Peer], measure: Callable[[Peer], Found]) -> tuple[dict[str, Found], list[str]]:
    """Return the results by the servers' titles, and a sentence for each server that could not be measured."""
    results, notes = {}, []
    for peer in several:
        try:
            results[peer.title] = measure(peer)
        except NotStarted as error:
            notes.append(f"{peer.title} was not measured: {error}")
            progress(notes[-1])
    return results, notes


def progress(*words: object) -> None:
    """Print one line for whoever waits."""
    print(*words, file=sys.stderr, flush=True)
