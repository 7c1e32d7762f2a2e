"""`python -m bench agree`: our load generator and others' on one server, in alternation, and ratios of figures."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from attrs import asdict

from bench.agree.run import Failed, Run, run
from bench.agree.tools import FIGURES, OTHERS, OURS, Load, Tool
from bench.load.values import count, positive
from bench.peers.peer import ENVIRONMENTS, Setup
from bench.peers.running import NotReady, Running, started
from bench.peers.table import SERVERS
from bench.rig.node import free_port, short_folder
from bench.rig.result import Cell, Table, write_document
from bench.rig.table_text import tables_text

DESCRIPTION = """\
Send the same load to one node with a simulated engine, whose steps take as long in each run, by `python -m bench load`
and by the load tools of others, one after the other, and print the ratios of their figures to ours.
`python -m bench peers install aiperf guidellm bench-serving` installs the others."""
SERVER = "espalier-simulated-node"
REQUESTS_A_CLIENT = 25
AGREEMENT = 0.1
NOTE = "A ratio is the tool's figure over that of `load` in the same round. " + " ".join(
    f"{name}: {definition}." for name, definition in FIGURES.items()
)
LOG_NOTE = (
    "The same requests by the server's access log, from a request's head to the sending of its events: where these "
    "differ, the tool sent another load, or took the server's processors. Added: the tool's first token p50 less the "
    "server's. Cores: CPU time of all processes of a tool while its requests were answered."
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument("--tools", nargs="+", choices=OTHERS, default=list(OTHERS), metavar="NAME", help="default: all")
    parser.add_argument("--clients", nargs="+", type=count, default=[8, 32], metavar="N", help="default: 8 and 32")
    parser.add_argument("--rounds", type=count, default=3, help="default: 3")
    parser.add_argument(
        "--requests-a-client", type=count, default=REQUESTS_A_CLIENT, metavar="N", help=f"default: {REQUESTS_A_CLIENT}"
    )
    parser.add_argument("--step-ms", type=positive, default=6.0, help="of the simulated engine; default: 6")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="default: build/peers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")


def main(_parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, print tables, and return 1 if a tool or the server did not run."""
    others = [OTHERS[name] for name in arguments.tools]
    if missing := [tool.name for tool in others if not tool.is_installed(arguments.environments)]:
        print(f"bench agree: run python -m bench peers install {' '.join(missing)}", file=sys.stderr)
        return 1
    begun = datetime.now(UTC)
    try:
        runs = list(measure([OURS, *others], arguments))
    except (Failed, NotReady) as error:
        print(f"bench agree: {error}", file=sys.stderr)
        return 1
    tables = [table for clients in arguments.clients for table in clients_tables(runs, clients, others)]
    notes = disagreements(runs, others) or [f"every figure is within {AGREEMENT:.0%} of ours"]
    print(tables_text(tables), "", *notes, sep="\n")
    if arguments.json is not None:
        title = "Load tools on one server"
        samples = [asdict(each) for each in runs]
        write_document(
            arguments.json, ("agree", *words), begun, title=title, notes=notes, figures=tables, samples=samples
        )
    return 0


def measure(tools: Sequence[Tool], arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs: in each round and for each number of clients, all tools one after the other."""
    with short_folder() as folder:
        setup = Setup(
            folder=folder / "server",
            port=free_port(),
            slots=max(arguments.clients),
            step_s=arguments.step_ms / 1e3,
            environments=arguments.environments,
        )
        with started(SERVERS[SERVER], setup) as server:
            for number in range(arguments.rounds):
                for clients in arguments.clients:
                    load = _load(server, clients, arguments.requests_a_client)
                    for tool in tools:
                        print(f"round {number + 1}: {clients} clients: {tool.title}", file=sys.stderr, flush=True)
                        results = folder / f"{tool.name}-{clients}-{number}"
                        yield run(tool, load, server, results, arguments.environments)


def _load(server: Running, clients: int, requests_a_client: int) -> Load:
    return Load(
        url=server.url,
        model=server.model,
        tokenizer=server.setup.folder / "model",
        clients=clients,
        requests=clients * requests_a_client,
    )


def runs_of(runs: Sequence[Run], tool: Tool, clients: int) -> list[Run]:
    """Return the runs of a tool, in the order of the rounds."""
    return [each for each in runs if each.tool == tool.name and each.clients == clients]


def values(runs: Sequence[Run], figure: str) -> list[float]:
    """Return a figure of each run that has it."""
    return [each.figures[figure] for each in runs if figure in each.figures]


def ratios(runs: Sequence[Run], tool: Tool, clients: int, figure: str) -> list[float]:
    """Return a tool's figure over ours in each round; empty if the tool has no such figure."""
    pairs = zip(runs_of(runs, tool, clients), runs_of(runs, OURS, clients), strict=True)
    return [each.figures[figure] / ours.figures[figure] for each, ours in pairs if figure in each.figures]


def added_ms(each: Run) -> float:
    """Return how much later than by the server's log the tool had its first token, p50."""
    return each.figures["first token p50 ms"] - each.server["first token p50 ms"]


def clients_tables(runs: Sequence[Run], clients: int, others: Sequence[Tool]) -> list[Table]:
    """Return two tables for a number of clients: the tools' figures, and the server's of the same requests."""
    figures: list[list[Cell]] = []
    for figure in FIGURES:
        row: list[Cell] = [figure, values(runs_of(runs, OURS, clients), figure)]
        for tool in others:
            row += [values(runs_of(runs, tool, clients), figure), ratios(runs, tool, clients, figure)]
        figures.append(row)
    columns = ("", OURS.name, *(word for tool in others for word in (tool.name, "ratio")))
    names = ("first token p50 ms", "first token p99 ms", "request p50 ms")
    logged: list[list[Cell]] = []
    for tool in (OURS, *others):
        several = runs_of(runs, tool, clients)
        row = [
            tool.name,
            *([each.server[name] for each in several] for name in names),
            [added_ms(each) for each in several],
        ]
        logged.append([*row, [each.prompt_tokens for each in several], [each.cores for each in several]])
    return [
        Table(title=f"{clients} clients", columns=columns, rows=figures, note=NOTE),
        Table(
            title=f"{clients} clients, by the server's access log",
            columns=("", *names, "added ms", "prompt tokens", "tool's cores"),
            rows=logged,
            note=LOG_NOTE,
        ),
    ]


def disagreements(runs: Sequence[Run], others: Sequence[Tool]) -> list[str]:
    """Return a sentence for each figure whose median ratio is not within `AGREEMENT` of 1."""
    sentences = []
    for clients in dict.fromkeys(each.clients for each in runs):
        for tool in others:
            for figure in FIGURES:
                several = ratios(runs, tool, clients, figure)
                if several and abs(statistics.median(several) - 1) > AGREEMENT:
                    median = statistics.median(several)
                    sentences.append(f"{tool.title}, {clients} clients: {figure} is {median:.2f} of ours")
    return sentences
