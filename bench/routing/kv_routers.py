"""Dynamo 1.6.1's KV router beside this server's policy `kv`: the same load and pace, on engines of the same costs.

Each has two engines that compute nothing: Dynamo's mockers, and simulated ones. Page size, memory, slots and the
duration of a step are the same; both engines together have the memory for all that the load shares, and neither has it
alone. Every round starts each server anew, without anything in its caches, and sends it the load, by prefix and in
turn. One engine with all the memory gets the load, too: more than it finds no routing can find.

Each request has a connection of its own: Dynamo's front end leaves Nagle's algorithm on, and the first token of an
answer on a connection that was used before waits up to 40 ms for the client's acknowledgement.

The mocker reports no cached tokens to clients. Its hit share is counted from the metrics of its forward passes, which
a process of Dynamo's own records: prompt tokens that were read, of those and the computed ones. Their sum must be the
prompt tokens of all answers, or the share is not printed.

    python -m bench peers install dynamo-mocker
    python -m bench.routing.kv_routers

Some minutes each load. The processes of the router are Dynamo's front end and this server's node with the gateway.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, evolve, field

from bench.cost.accounts import take
from bench.peers.dynamo import MOCKER, PLANES, front_end, variables
from bench.peers.mock_model import mock_model
from bench.peers.peer import ENVIRONMENTS, MODEL, PAGE_SIZE, Command, Peer, Setup
from bench.peers.running import Running, started
from bench.rig.node import free_port, metric, short_folder, wait_until
from bench.rig.result import Cell, Table
from bench.rig.table_text import table_text
from bench.routing import loads
from bench.routing.loads import PREFILL_CHUNK, PREFILL_TOKEN_S, STEP_S, Figures, Load, espalier

SLOTS = 8
ENGINES = 2
SETTLED_S = 1.5  # after a start or a load
ROUTER_GROUPS = {"node front", "frontend"}  # of processes


def dynamos(mode: str, setup: Setup, *options: str) -> list[Command]:
    """Return the commands of the front end, of one process with all mockers, and of what records steps."""
    front, python, added = front_end(setup, MOCKER), setup.python(MOCKER), variables(setup)
    model = ("--model-path", str(mock_model(setup.folder / "model")), "--model-name", MODEL)
    engine = setup.folder / "engine.json"
    engine.write_text(json.dumps({"engine": mocked_engine(setup)}))
    mocker = (python, "-m", "dynamo.mocker", *model, "--extra-engine-args", str(engine))
    recorder = (python, "-m", "dynamo.common.recv_forward_pass_metrics", "--flush-interval", "0.2", *PLANES[:4])
    return [
        Command("frontend", (*front.words, "--router-mode", mode, *options), added),
        Command("mocker", (*mocker, "--num-workers", str(setup.workers), *PLANES), added),
        Command("recorder", (*recorder, "--output", str(setup.folder / "steps.jsonl")), added),
    ]


def mocked_engine(setup: Setup) -> dict[str, Any]:
    """Return the mocker's own description of an engine, whose durations are in a file that is written here."""
    file = setup.folder / "durations.npz"
    lengths, step_ms = (1.0, float(PREFILL_CHUNK)), 1000 * setup.step_s
    np.savez(
        file,
        prefill_isl=np.array(lengths),
        prefill_ttft_ms=np.array([step_ms + 1000 * PREFILL_TOKEN_S * tokens for tokens in lengths]),
        decode_active_kv_tokens=np.array([0.0, 1e6]),
        decode_context_length=np.array([1.0, 1e6]),
        decode_itl=np.full((2, 2), step_ms),
    )
    return {
        "backend": "sglang",
        "num_gpu_blocks": setup.kv_tokens_max // PAGE_SIZE,
        "block_size": PAGE_SIZE,
        "max_num_seqs": setup.slots,
        "sglang": {"max_prefill_tokens": PREFILL_CHUNK, "chunked_prefill_size": PREFILL_CHUNK},
        "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(file)}},
    }


def dynamo(title: str, mode: str, *options: str) -> Peer:
    """Return Dynamo with a mode of its router."""
    return Peer(
        name="dynamo",
        title=title,
        engine="simulated",
        commands=lambda setup: dynamos(mode, setup, *options),
        environments=(MOCKER,),
        workers_max=ENGINES,
    )


# The value is the best of Dynamo's own published sweep.
TUNED = dynamo("dynamo kv, tuned", "kv", "--router-prefill-load-scale", "32")
OURS = espalier("kv", "simulated", apart=True)
ROUTERS: dict[str, tuple[Peer, int]] = {  # and on how many engines
    "espalier kv": (OURS, ENGINES),
    "dynamo kv": (dynamo("dynamo kv", "kv"), ENGINES),
    "dynamo kv, tuned": (TUNED, ENGINES),
    "espalier round_robin": (espalier("round_robin", "simulated", apart=True), ENGINES),
    "dynamo round-robin": (dynamo("dynamo round-robin", "round-robin"), ENGINES),
    "espalier, one engine": (OURS, 1),
    "dynamo, one engine": (dynamo("dynamo kv", "kv"), 1),
}


@define
class RouterFigures(Figures):
    """The figures of one router."""

    cpu_ms: list[float] = field(factory=list)  # of the router's processes, a request
    decision_us: list[float] = field(factory=list)  # by the server's own metric; Dynamo has none in turn

    def row(self, title: str) -> list[Cell]:
        """Return a row of the table."""
        return [title, *self.cells(), self.cpu_ms, self.decision_us]


@define
class Measured:
    """One running server, what it has computed so far, and what its router has spent."""

    running: Running

    def cpu_s(self) -> float:
        """Return the CPU time of the processes of the router."""
        accounts = take(self.running.root_pids).values()
        return sum(account.usage.cpu_s for account in accounts if account.group in ROUTER_GROUPS)

    def decisions(self) -> tuple[float, float]:
        """Return the time that decisions took so far, in microseconds, and their number."""
        text = self.running.metrics()
        mine, other = "espalier_routing_decision_seconds", "dynamo_router_overhead_total_ms"
        spent_us = 1e6 * metric(text, f"{mine}_sum") + 1e3 * metric(text, f"{other}_sum")
        return spent_us, metric(text, f"{mine}_count") + metric(text, f"{other}_count")

    def steps(self) -> list[dict[str, Any]]:
        """Return the mockers' forward passes so far; of simulated engines there are none."""
        file = self.running.setup.folder / "steps.jsonl"
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line)["metrics"] for line in whole]

    def wait_engines(self) -> None:
        """Wait until every engine can be chosen; raises `RuntimeError`."""
        engines = self.running.setup.workers

        def there() -> bool:
            if "recorder" in self.running.roots:
                return len({step["worker_id"] for step in self.steps()}) >= engines
            return metric(self.running.metrics(), "espalier_link_up") >= engines

        if wait_until(there, 30.0, every_s=0.2) is None:
            raise RuntimeError(f"{self.running.peer.title}: fewer than {engines} engines")
        time.sleep(SETTLED_S)

    def prompt_tokens(self) -> tuple[int, int]:
        """Return the prompt tokens that were found in a cache so far, and all of them."""
        if "recorder" not in self.running.roots:
            text = self.running.metrics()
            cached, every = (metric(text, "espalier_tokens_total", kind=kind) for kind in ("cached", "input"))
            return int(cached), int(every)
        scheduled = [step["scheduled_requests"] for step in self.steps()]
        cached = sum(each["sum_prefill_kv_tokens"] for each in scheduled)
        return cached, cached + sum(each["sum_prefill_tokens"] for each in scheduled)


def measure(peer: Peer, engines: int, load: Load, environments: Path, figures: RouterFigures) -> None:
    """Start a server, send it a load once, and add what came of it."""
    with short_folder() as folder:
        share = ENGINES // engines
        setup = Setup(
            folder=folder,
            port=free_port(),
            slots=SLOTS * share,
            workers=engines,
            kv_tokens_max=load.kv_tokens * share,
            step_s=STEP_S,
            environments=environments.absolute(),
        )
        with started(peer, setup) as running:
            measured = Measured(running)
            measured.wait_engines()
            cpu_before_s = measured.cpu_s()
            records = loads.send(running.url, load, exact=True, reuse=False)
            time.sleep(SETTLED_S)
            (cached, every), (spent_us, choices) = measured.prompt_tokens(), measured.decisions()
            cpu_used_s = measured.cpu_s() - cpu_before_s
    prompts = sum(record.prompt_tokens or 0 for record in records)
    if every != prompts:
        raise RuntimeError(f"{peer.title}: the engines have read {every} prompt tokens, answers have {prompts}")
    figures.add(records, cached, every)
    figures.cpu_ms.append(1000 * cpu_used_s / len(records))
    figures.decision_us += [spent_us / choices] if choices else []


def load_of(name: str, seed: int, scale: float) -> Load:
    """Return a load of the policies' bench, the trace at the times of its requests."""
    load = loads.load(name, seed, scale=scale)
    return evolve(load, clients=None) if name == "trace" else load


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing.kv_routers", description=__doc__.partition("\n")[0])
    loads.add_arguments(parser, ("shared", "trace"))
    parser.add_argument("--routers", nargs="*", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of peers; default: build/peers")
    options = parser.parse_args(words)
    for name in options.loads:
        found = {title: RouterFigures() for title in options.routers}
        for number in range(options.rounds):
            load = load_of(name, number, options.scale)
            for title in options.routers if number % 2 == 0 else options.routers[::-1]:
                measure(*ROUTERS[title], load, options.environments, found[title])
                sys.stderr.write(f"{name} {number} {title:22}{found[title].words()}\n")
        columns = ("", *loads.COLUMNS, "CPU of the router a request, ms", "a choice, us")
        rows = [figures.row(title) for title, figures in found.items()]
        print(table_text(Table(title=f"{name}, {options.rounds} rounds", columns=columns, rows=rows)), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
