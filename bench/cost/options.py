"""The arguments that `cost` and `versus` share: which loads, how often, and where the result goes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.cost.sample import PROMPT_TOKENS, Load
from bench.load.messages import PATHS, Api
from bench.load.values import count, positive
from bench.peers.peer import ENVIRONMENTS, Setup
from bench.rig.node import free_port

REQUESTS_A_CLIENT = 3
REQUESTS_MIN = 32  # of a load: fewer would be over in a moment, which may be a bad one of the machine
SLOTS_MIN = 64
STEP_MS = 6.0
KV_TOKENS_MIN = 16384
TOKENS_A_WORD_MAX = 3  # of a prompt, by the tiny model's tokenizer


def add(parser: argparse.ArgumentParser, *, clients: Sequence[int], apis: Sequence[Api]) -> None:
    """Add the arguments to a parser."""
    load = parser.add_argument_group("load")
    load.add_argument("--apis", nargs="+", choices=sorted(PATHS), default=list(apis), help=_default(apis))
    load.add_argument("--clients", nargs="+", type=count, default=list(clients), metavar="N", help=_default(clients))
    load.add_argument("--output-tokens", nargs="+", type=count, default=[128], metavar="N", help="default: 128")
    load.add_argument(
        "--requests-a-client",
        type=count,
        default=REQUESTS_A_CLIENT,
        metavar="N",
        help=f"default: {REQUESTS_A_CLIENT}, and {REQUESTS_MIN} of all clients at least; 1: all clients ask at once",
    )
    load.add_argument(
        "--warm-connections", action="store_true", help="take the warm-up's, so that no price has their opening in it"
    )
    load.add_argument("--processes", type=count, default=1, metavar="N", help="of the clients; default: 1")
    output = parser.add_argument_group("servers and output")
    output.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="of peers; default: build/peers")
    output.add_argument(
        "--step-ms", type=positive, default=STEP_MS, metavar="MS", help="of a simulated engine or a mocker; default: 6"
    )
    output.add_argument("--json", type=Path, metavar="FILE", help="write every figure as one document")


def loads(arguments: argparse.Namespace) -> list[Load]:
    """Return the loads of a parsed command line, the APIs of each number of clients and tokens together."""
    once = arguments.requests_a_client == 1
    return [
        Load(
            api=api,
            clients=clients,
            output_tokens=tokens,
            requests=clients if once else max(REQUESTS_MIN, arguments.requests_a_client * clients),
            processes=min(arguments.processes, clients),
            warm=arguments.warm_connections,
        )
        for clients in arguments.clients
        for tokens in arguments.output_tokens
        for api in arguments.apis
    ]


def seeded_loads(arguments: argparse.Namespace, number: int) -> list[tuple[Load, int]]:
    """Return the loads of one round or run, each with its own seed: an engine has prompts cached that it has seen."""
    several = loads(arguments)
    return [(load, number * len(several) + place) for place, load in enumerate(several)]


def setup(arguments: argparse.Namespace, folder: Path) -> Setup:
    """Return the setup of a server that can take every load; servers that are compared have the same but for places."""
    clients = max(arguments.clients)
    request_tokens = TOKENS_A_WORD_MAX * PROMPT_TOKENS + max(arguments.output_tokens)
    return Setup(
        folder=folder,
        port=free_port(),
        slots=max(SLOTS_MIN, clients),
        kv_tokens_max=max(KV_TOKENS_MIN, -(-clients * request_tokens // 1024) * 1024),
        step_s=arguments.step_ms / 1000,
        environments=arguments.environments,
    )


def describe(load: Load) -> str:
    """Return a load in a few words."""
    tokens = f"{load.output_tokens} token{'s' if load.output_tokens > 1 else ''}"
    warm = ", warm connections" if load.warm else ""
    return f"{load.clients} client{'s' if load.clients > 1 else ''}, {tokens}, {load.api}{warm}"


def _default(values: Sequence[object]) -> str:
    return f"default: {' '.join(map(str, values))}"
