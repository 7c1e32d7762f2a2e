"""The part that benches of several servers share: their arguments, a fresh start for each server, and the document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from attrs import evolve

from bench.peers.peer import ENVIRONMENTS, Command, Peer, Setup
from bench.peers.running import NotInstalled, NotReady, Running, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder
from bench.rig.result import Figure, Table, about, write
from bench.rig.table_text import table_text

ServerGone = (NotInstalled, NotReady)
Measured = TypeVar("Measured")


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
    """Start a server in a folder of its own, and end it; raises one of `ServerGone`."""
    with short_folder() as folder:
        setup = Setup(folder=folder, port=free_port(), slots=slots, workers=workers, environments=environments)
        with started(peer, setup) as running:
            yield running


def for_each(several: Sequence[Peer], measure: Callable[[Peer], Measured]) -> tuple[dict[str, Measured], list[str]]:
    """Return the results by the servers' titles, and a sentence for each server that could not be measured."""
    results, notes = {}, []
    for peer in several:
        try:
            results[peer.title] = measure(peer)
        except ServerGone as error:
            notes.append(f"{peer.title} was not measured: {error}")
            print(notes[-1], file=sys.stderr, flush=True)
    return results, notes


def progress(*words: object) -> None:
    """Print one line for whoever waits."""
    print(*words, file=sys.stderr, flush=True)


def finish(
    arguments: argparse.Namespace,
    words: Sequence[str],
    begun: datetime,
    *,
    title: str,
    figures: Sequence[Figure],
    notes: Sequence[str],
    samples: object,
) -> int:
    """Print the tables and notes, and write the document; return 1 if nothing could be measured."""
    for figure in figures:
        if isinstance(figure, Table):
            print(table_text(figure), end="\n\n")
    print(*notes, sep="\n")
    if arguments.json is not None:
        document = {
            "schema": f"espalier.bench.{arguments.command}/1",
            "title": title,
            **about((arguments.command, *words), begun),
            "notes": notes,
            "figures": figures,
            "samples": samples,
        }
        write(arguments.json, document)
    return 0 if samples else 1


def now() -> datetime:
    """Return when a bench begins."""
    return datetime.now(UTC)
