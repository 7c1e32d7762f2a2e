"""The time that a node adds to what its engine does: the first token, and the gaps between tokens.

`python -m tests.system.added_latency` starts a node with SGLang's engine, and beside it the same engine without a node:
its host, asked in this process through the engine port. Both get the same prompts in alternation, so that a busy hour
of the machine slows both. Of the bare engine only those tokens count that bring text, since a client of a node sees no
others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import trio
from attrs import frozen
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from actors.engines.port import Engine
from bench.cost.sample import Load
from bench.load import measure
from bench.load.plan import planned_request
from bench.load.process import run_to_end, split_job
from bench.peers.peer import MODEL, MODEL_FOLDER, PAGE_SIZE, PREFILL_CHUNK, Setup
from bench.peers.running import Running, started
from bench.peers.table import SERVERS
from bench.report.targets import ADDED
from bench.rig.node import free_port, short_folder
from bench.rig.result import Cell, Table, about, percentile, surroundings, write
from bench.rig.table_text import table_text
from bench.stages.model import subject
from protocol.messages.generation import Generate, Sampling, Tokens
from protocol.messages.text import Role, Turn
from protocol.token_ids import TokenIds
from tests.contracts.engine import new_id
from tests.system.sglang.conftest import ZygoteProcess, real_engine, running_zygote

ROUNDS = 5
LOADS = (Load(clients=1, requests=64, output_tokens=16), Load(clients=64, requests=192))
SLOTS, KV_TOKENS_MAX = 64, 16384
COMMAND = ("python", "-m", "tests.system.added_latency")
NOTE = (
    "Of one client's first tokens the difference, in milliseconds; of the gaps the ratio. Each value is of one round, in "
    "which the same prompts go through the node and then to the bare engine."
)


@frozen
class Times:
    """When the text of each request came, in seconds after it was sent."""

    requests: Sequence[Sequence[float]]

    def first_ms(self, percent: float) -> float:
        """Return a percentile of the times to the first text."""
        return 1e3 * percentile(sorted(times[0] for times in self.requests), percent)

    def gap_ms(self, percent: float) -> float:
        """Return a percentile of the gaps between texts."""
        gaps = (after - before for times in self.requests for before, after in pairwise(times))
        return 1e3 * percentile(sorted(gaps), percent)


def through_the_node(load: Load, node: Running, seed: int) -> Times:
    """Send a load to the node, from a process of its own."""
    run = run_to_end(split_job(load.job(node.url, node.model, seed, load.clients), 1))
    return Times([measure.stamps(record) for record in run.records])


def prompts(load: Load, seed: int, numbers: Iterable[int]) -> list[TokenIds]:
    """Return the tokens of the requests that `load` sends, as the node renders and tokenises them."""
    workload, model = load.job("http://127.0.0.1:1", MODEL, seed, 0).workload, subject(MODEL_FOLDER).model
    return [model.encode((Turn(Role.USER, planned_request(workload, number).prompt),)) for number in numbers]


async def at_the_engine(load: Load, engine: Engine, seed: int) -> Times:
    """Send the same requests to the engine itself, after the same warm-up."""
    await _asked(load, engine, prompts(load, seed, range(-load.clients, 0)))
    answers = await _asked(load, engine, prompts(load, seed, range(load.requests)))
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    return Times([with_text(tokenizer, answer) for answer in answers])


Arrivals = list[tuple[float, Sequence[int]]]


async def _asked(load: Load, engine: Engine, several: Sequence[TokenIds]) -> list[Arrivals]:
    """Return when which tokens of each answer came; each client asks again when it has its answer."""
    left, answers = iter(several), list[Arrivals]()

    async def client() -> None:
        for tokens in left:
            sent_at, arrivals = time.perf_counter(), Arrivals()
            sampling = Sampling(tokens_max=load.output_tokens, temperature=0.0, ignore_eos=True)
            generation = engine.submit(Generate(new_id(), tokens, sampling))
            async for reply in generation:
                if isinstance(reply, Tokens):
                    arrivals.append((time.perf_counter() - sent_at, reply.ids))
            await generation.result()
            answers.append(arrivals)

    async with trio.open_nursery() as clients:
        for _ in range(load.clients):
            clients.start_soon(client)
    return answers


def with_text(tokenizer: Tokenizer, arrivals: Arrivals) -> list[float]:
    """Return the times of those arrivals whose tokens bring text."""
    stream, times = DecodeStream(skip_special_tokens=True), []
    for at_s, ids in arrivals:
        texts = [stream.step(tokenizer, token) for token in ids]
        if any(texts):
            times.append(at_s)
    return times


def table(measured: dict[int, list[tuple[Times, Times]]]) -> Table:
    """Return the table of all rounds, by the number of clients: the bare engine, the node, and what the node adds."""
    rows: list[list[Cell]] = []
    for clients, pairs in measured.items():
        name = f"{clients} client{'s' if clients > 1 else ''}"
        for what, percent in (("first token p50 ms", 50.0), ("first token p99 ms", 99.0)):
            bare, node = ([times.first_ms(percent) for times in side] for side in zip(*pairs, strict=True))
            rows.append([f"{what}, {name}", bare, node, [b - a for a, b in zip(bare, node, strict=True)]])
        for what, percent in (("gap p50 ms", 50.0), ("gap p99 ms", 99.0)):
            bare, node = ([times.gap_ms(percent) for times in side] for side in zip(*pairs, strict=True))
            rows.append([f"{what}, {name}", bare, node, [b / a for a, b in zip(bare, node, strict=True)]])
    return Table(title=ADDED, columns=("", "bare engine", "node", "difference, or ratio of gaps"), rows=rows, note=NOTE)


async def alternated(zygote: ZygoteProcess, node: Running, rounds: int) -> dict[int, list[tuple[Times, Times]]]:
    """Return the times of the bare engine and of the node in each round, by the number of clients."""
    measured: dict[int, list[tuple[Times, Times]]] = {}
    async with real_engine(
        zygote, slots=SLOTS, kv_tokens_max=KV_TOKENS_MAX, page_size=PAGE_SIZE, prefill_chunk=PREFILL_CHUNK
    ) as engine:
        for seed in range(rounds):
            for load in LOADS:
                # In a thread, since the load runs in a loop of its own.
                served = await trio.to_thread.run_sync(through_the_node, load, node, seed)
                bare = await at_the_engine(load, engine, seed)
                measured.setdefault(load.clients, []).append((bare, served))
    return measured


def main(words: list[str]) -> int:
    """Measure, print the table, and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")
    arguments = parser.parse_args(words)
    begun = datetime.now(UTC)
    surroundings()
    with short_folder() as folder, short_folder() as own, running_zygote(own) as zygote:
        setup = Setup(folder=folder, port=free_port(), slots=SLOTS, kv_tokens_max=KV_TOKENS_MAX)
        with started(SERVERS["espalier"], setup) as node:
            figure = table(trio.run(alternated, zygote, node, arguments.rounds, strict_exception_groups=True))
    print(table_text(figure), figure.note, sep="\n")  # noqa: T201
    if arguments.json is not None:
        document = {
            "schema": "espalier.bench.added-latency/1",
            "title": "The time that a node adds to its engine's",
            **about((), begun),
            "command": [*COMMAND, *words],
            "figures": [figure],
        }
        write(arguments.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
