"""Dynamo 1.6.1's KV router beside this server's policy `kv`: the same load and pace, on engines of the same costs.

Each has two engines that compute nothing: Dynamo's mockers, and simulated ones. Page size, memory, slots and the
duration of a step are the same; both engines together have the memory for all that the load shares, and neither has it
alone. One engine with all the memory gets the load, too: more than it finds no routing can find.

The mocker reports no cached tokens to clients. Its hit share is computed from the metrics of its forward passes, which
a process of Dynamo's own records: the prompt tokens read from the cache, divided by the read and computed ones. Their
sum must be the prompt tokens of all answers, or the share is not printed.

    python -m bench peers install dynamo-mocker
    python -m bench.routing.kv_routers

Some minutes each load. The processes of the router are Dynamo's front end and this server's node with the gateway.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve

from bench.peers.dynamo import MOCKER, PLANES, front_end, variables
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, PAGE_SIZE, Command, Peer, Setup
from bench.routing import loads
from bench.routing.loads import PREFILL_CHUNK, PREFILL_TOKEN_S, espalier
from bench.routing.rounds import STEPS, Servers, add_arguments, compare

ENGINES = 2


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
        Command("recorder", (*recorder, "--output", str(setup.folder / STEPS)), added),
    ]


def mocked_engine(setup: Setup) -> dict[str, Any]:
    """Write the durations of an engine into a file, and return the mocker's description of the engine."""
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
ROUTERS: Servers = {
    "espalier kv": (OURS, ENGINES),
    "dynamo kv": (dynamo("dynamo kv", "kv"), ENGINES),
    "dynamo kv, tuned": (TUNED, ENGINES),
    "espalier round_robin": (espalier("round_robin", "simulated", apart=True), ENGINES),
    "dynamo round-robin": (dynamo("dynamo round-robin", "round-robin"), ENGINES),
    "espalier, one engine": (OURS, 1),
    "dynamo, one engine": (dynamo("dynamo kv", "kv"), 1),
}


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing.kv_routers", description=__doc__.partition("\n")[0])
    add_arguments(parser, ("shared", "trace"))
    parser.add_argument("--routers", nargs="*", choices=ROUTERS, default=list(ROUTERS))
    options = parser.parse_args(words)
    for name in options.loads:
        rounds = [loads.load(name, number, scale=options.scale) for number in range(options.rounds)]
        if name == "trace":  # at the times of its requests
            rounds = [evolve(load, clients=None) for load in rounds]
        compare(name, {title: ROUTERS[title] for title in options.routers}, rounds, ENGINES)


if __name__ == "__main__":
    main(sys.argv[1:])
