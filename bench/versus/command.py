"""`python -m bench versus PEER`: both servers up, loads in alternation, and the ratios of ours to the peer's."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from attrs import asdict, evolve

from bench.cost import options
from bench.cost import report as cost_report
from bench.cost.sample import Load, Sample, measure_load
from bench.load.process import Failed
from bench.load.values import count
from bench.peers.peer import Peer
from bench.peers.running import NotStarted, Running, started
from bench.peers.table import COUNTERPARTS, OURS, SERVERS
from bench.rig.node import short_folder
from bench.rig.result import write_document
from bench.rig.table_text import tables_text
from bench.versus import ratios
from bench.versus.ratios import Pair

DESCRIPTION = """\
Start a peer and this server with the same engine and the same flags, send them the same loads in alternation, and print
the ratios of what they cost and of what their clients see. `python -m bench peers list` names the peers."""
ROUNDS, STARTS = 5, 3


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("peer", choices=SERVERS)
    parser.add_argument("--ours", choices=OURS, help="default: the one with the same kind of engine")
    often = parser.add_argument_group("how often")
    often.add_argument("--rounds", type=count, help=f"alternations in all; default: {ROUNDS}")
    often.add_argument("--starts", type=count, help=f"of both servers, which share the rounds; default: {STARTS}")
    often.add_argument("--quick", action="store_true", help="two rounds of one start, unless they are given")
    options.add(parser, clients=(64, 16), apis=("chat", "responses-ws"))


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, print tables, and return 1 if a server did not start or answer."""
    ours = OURS[arguments.ours or COUNTERPARTS[SERVERS[arguments.peer].engine]]
    peer = SERVERS[arguments.peer]
    if peer.engine != ours.engine:
        parser.error(f"--ours: {ours.name} has another kind of engine than {peer.name}")
    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    starts = min(rounds, arguments.starts or (1 if arguments.quick else STARTS))
    begun = datetime.now(UTC)
    try:
        pairs = list(measure(arguments, ours.name, shares(rounds, starts)))
    except (Failed, NotStarted) as error:
        print(f"bench versus: {error}", file=sys.stderr)
        return 1
    figures = ratios.tables(peer.title, ours.title, pairs)
    titled = ((peer.title, [pair.theirs for pair in pairs]), (ours.title, [pair.ours for pair in pairs]))
    warnings = dict.fromkeys(line for _, samples in titled for line in cost_report.warnings(samples))
    notes = [f"rounds: {rounds}; starts of both servers: {starts}", *warnings]
    print(tables_text(figures), "", *notes, sep="\n")
    if arguments.json is not None:
        sides = zip(("theirs", "ours"), titled, strict=True)
        write_document(
            arguments.json,
            ("versus", *words),
            begun,
            title=f"{ours.title} beside {peer.title}",
            notes=notes,
            figures=[*figures, *(figure for title, each in titled for figure in cost_report.tables(title, each))],
            samples={side: [asdict(sample) for sample in samples] for side, (_, samples) in sides},
        )
    return 0


def shares(rounds: int, starts: int) -> list[int]:
    """Return how many rounds each start has."""
    return [rounds // starts + (start < rounds % starts) for start in range(starts)]


def measure(arguments: argparse.Namespace, ours: str, rounds: Sequence[int]) -> Iterator[Pair]:
    """Yield the pairs of each start: both servers are up, and each load of the peer is followed by the same of ours."""
    number = 0
    for start, several in enumerate(rounds):
        with (
            short_folder() as folder,
            started(SERVERS[arguments.peer], options.setup(arguments, folder / "theirs"), ready=False) as theirs,
            started(SERVERS[ours], options.setup(arguments, folder / "ours"), ready=False) as own,
        ):
            theirs.wait_ready()
            own.wait_ready()
            for _ in range(several):
                for load, seed in options.seeded_loads(arguments, number):
                    asked = ((theirs, load_for(theirs.peer, load)), (own, load))
                    pair = Pair(*(_sample(server, each, seed, start) for server, each in asked))
                    _show(pair, number, sum(rounds))
                    yield pair
                number += 1


def load_for(peer: Peer, load: Load) -> Load:
    """Return the load that a peer can take: by its first API, if it lacks the one that ours is asked by."""
    return load if load.api in peer.apis else evolve(load, api=peer.apis[0])


def _sample(server: Running, load: Load, seed: int, start: int) -> Sample:
    return measure_load(load, url=server.url, model=server.model, roots=server.root_pids, seed=seed, start=start)


def _show(pair: Pair, number: int, rounds: int) -> None:
    cost = ratios.FIGURES["CPU us a token"]
    values = f"{cost(pair.theirs):.1f} and {cost(pair.ours):.1f} us a token, ratio {pair.ratio(cost) or 0:.2f}"
    print(f"round {number + 1} of {rounds}: {ratios.heading(pair)}: {values}", file=sys.stderr, flush=True)
