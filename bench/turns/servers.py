"""The servers that sessions grow against, with the same model and two workers each behind a router by prefix.

Their engines compute nothing. Ours are on nodes of their own, so that what a gateway spends is known apart from what
its engines do, as with Dynamo's front end and mockers.

Long prompts need few settings. Our gateway takes prompts of 262,144 tokens, bodies of 4 MiB and WebSockets' histories
of 8 MiB by its defaults; an engine has to be given `context_max` and `kv_tokens_max`. A chunk as long as the longest
prompt lets each be computed in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from bench.load.messages import Api
from bench.peers import dynamo, espalier
from bench.peers.peer import MODEL, Command, Peer, Setup
from bench.rig.node import free_ports
from bench.turns.models import CONTEXT_MAX, write_model

POLICY = 'policy = "kv"'
SIMULATED = f"""\
[engine.{{model}}-{{number}}]
{{node}}
model = "{{model}}"
kind = "simulated"
slots = {{slots}}
kv_tokens_max = {{kv_tokens_max}}
context_max = {CONTEXT_MAX}
page_size = {{page_size}}
prefill_chunk = {CONTEXT_MAX}
simulated.costs = {{{{ fixed_s = {{step_s}}, per_prefill_token_s = 0.0, per_running_s = 0.0 }}}}
"""
# Without a cache they publish no blocks, either: what is left of a worker's node is the product's.
PAGELESS = SIMULATED + "simulated.prefix_cache = false\n"
APIS: tuple[Api, ...] = ("chat", "responses", "responses-ws")

SMG_WORKER = Path(__file__).parent / "smg_worker.py"
SMG_AFTER_S = 2
ENGINE_GROUPS = ("mocker", "scheduler", "node worker", "worker")
"""The beginnings of the groups of processes (`bench.cost.groups`) that are an engine, or have one in them."""


def is_engine(group: str) -> bool:
    """Whether a group of processes has the engine in it."""
    return group.startswith(ENGINE_GROUPS)


def servers(tokenizer: str) -> dict[str, Peer]:
    """Return the servers by their names, each with a model of one of the tokenizers."""

    def ours(name: str, title: str, engine: str, *, apart: bool = True) -> Peer:
        def commands(setup: Setup) -> list[Command]:
            folder = write_model(tokenizer, setup.folder / "model", setup.environments)
            return espalier.commands(setup, engine, folder, apart=apart, model_lines=POLICY)

        return Peer(
            name=name,
            title=title,
            engine="simulated",
            commands=commands,
            apis=APIS,
            workers_max=16,
            ready_path="/ready",
        )

    def theirs(name: str, title: str, variables: Mapping[str, str], *words: str) -> Peer:
        def commands(setup: Setup) -> list[Command]:
            folder = write_model(tokenizer, setup.folder / "model", setup.environments)
            return _dynamo(setup, folder, variables, words)

        return Peer(
            name=name,
            title=title,
            engine="simulated",
            environments=(dynamo.MOCKER,),
            commands=commands,
            apis=("chat", "responses"),
            workers_max=16,
        )

    def smg(name: str, title: str, *words: str) -> Peer:
        def commands(setup: Setup) -> list[Command]:
            return _smg(setup, write_model(tokenizer, setup.folder / "model", setup.environments), words)

        return Peer(
            name=name,
            title=title,
            engine="simulated",
            environments=("smg", "smg-worker"),
            commands=commands,
            workers_max=16,
            ready_path="/readiness",
        )

    several = (
        ours("espalier", "Espalier", SIMULATED),
        ours("espalier-pageless", "Espalier, engines without pages", PAGELESS),
        ours("espalier-node", "Espalier, one node", SIMULATED, apart=False),
        theirs("dynamo", "Dynamo 1.6.1", {}),
        theirs("dynamo-uncached", "Dynamo 1.6.1 without its tokenizer's cache", {"DYN_TOKENIZER_CACHE_BYTES": "0"}),
        theirs("dynamo-fastokens", "Dynamo 1.6.1 with fastokens", {}, "--tokenizer", "fastokens"),
        smg("smg", "SMG 1.13.0 with its tokenizer's cache", "--tokenizer-cache-enable-l1"),
        smg("smg-uncached", "SMG 1.13.0"),
    )
    return {peer.name: peer for peer in several}


def _dynamo(setup: Setup, folder: Path, variables: Mapping[str, str], words: tuple[str, ...]) -> list[Command]:
    front, mocker = dynamo.with_mocker(setup, folder)
    front = evolve(front, words=(*front.words, "--router-mode", "kv", *words))
    sizes = (f"--sglang-{size}={CONTEXT_MAX}" for size in ("max-prefill-tokens", "chunked-prefill-size"))
    mocker = evolve(mocker, words=(*mocker.words, *sizes))
    return [evolve(command, variables={**command.variables, **variables}) for command in (front, mocker)]


def _smg(setup: Setup, folder: Path, words: tuple[str, ...]) -> list[Command]:
    *ports, metrics = free_ports(setup.workers + 1)
    worker = (setup.python("smg-worker"), str(SMG_WORKER))
    workers = [
        Command(f"worker-{number}", (*worker, str(port), str(folder), MODEL)) for number, port in enumerate(ports)
    ]
    urls = ("--worker-urls", *(f"grpc://127.0.0.1:{port}" for port in ports))
    launch = (setup.python("smg"), "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(setup.port))
    own = ("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "warn")
    words = (*launch, *own, *words, "--tokenizer-path", str(folder), *urls)
    # A worker that does not listen yet is tried again after 30 s.
    later = ("sh", "-c", f'sleep {SMG_AFTER_S}; exec "$@"', "sh")
    return [*workers, Command("gateway", (*later, *words))]
