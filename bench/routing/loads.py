"""Loads whose prompts share their beginnings.

Each names the memory of an engine that makes it worth routing: engines together have the memory for all that is shared,
and none has it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from random import Random

from attrs import evolve, frozen

from bench.load.plan import WORDS, PlannedRequest
from bench.peers import espalier as espalier_server
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL_FOLDER, Command, Engine, Peer, Setup

PREFIX_WORDS = 1000  # some 1,950 tokens of the tiny model
BLOCK_WORDS = 51  # of a trace, whose blocks are a tenth of those of a large model
CONVERSATIONS_MAX = 12  # that go on at once
CLIENTS = {"shared": 4, "trace": 6}
REQUESTS = {"shared": 200, "paced": 300, "trace": 160}
KV_TOKENS = {"shared": 20_000, "paced": 20_000, "trace": 7_000}
STEP_S, PREFILL_TOKEN_S = 0.01, 0.0001  # of simulated engines
PREFILL_CHUNK = 8192  # more than any prompt here: each is computed in one step
TRACE_EVERY_S = 0.05  # a request, where it is sent at its time
NAMES = tuple(REQUESTS)


SIMULATED = f"""\
[engine.{{model}}-{{number}}]
{{node}}
model = "{{model}}"
kind = "simulated"
slots = {{slots}}
kv_tokens_max = {{kv_tokens_max}}
page_size = {{page_size}}
prefill_chunk = {PREFILL_CHUNK}
simulated.costs = {{{{ fixed_s = {STEP_S}, per_prefill_token_s = {PREFILL_TOKEN_S}, per_running_s = 0.0 }}}}
"""
PUBLISHING = "events.publish = true\n"


def espalier(policy: str, kind: Engine, *, apart: bool = False) -> Peer:
    """Return this server with a policy; `apart`: each engine is on a node of its own."""

    def commands(setup: Setup) -> list[Command]:
        text = espalier_server.SGLANG if kind == "sglang" else SIMULATED
        path = MODEL_FOLDER if kind == "sglang" else mock_model(setup.folder / "model")
        lines = f'policy = "{policy}"'
        several = espalier_server.commands(setup, text + PUBLISHING, path, apart=apart, model_lines=lines)
        return [evolve(command, variables={"OMP_NUM_THREADS": "1"}) for command in several]

    title = f"espalier {policy}"
    return Peer(name="espalier", title=title, engine=kind, commands=commands, workers_max=8, ready_path="/ready")


@frozen(kw_only=True)
class Load:
    """One load: its requests, and by how many clients they are sent, None if each has its time."""

    kv_tokens: int  # of each engine
    requests: tuple[PlannedRequest, ...]
    clients: int | None = None

    def at_rate(self, rate: float, seed: int) -> Load:
        """Return the load with its requests sent at random times, so many a second."""
        chance, at_s, requests = Random(f"{seed}/arrivals"), 0.0, list[PlannedRequest]()
        for request in self.requests:
            at_s += chance.expovariate(rate)
            requests.append(evolve(request, at_s=at_s))
        return evolve(self, requests=tuple(requests), clients=None)


def load(name: str, seed: int, *, engines: int = 2, scale: float = 1.0) -> Load:
    """Return a load for so many engines; `scale` is a factor for the number of its requests.

    `shared` and `paced` have the same kind of requests; whoever sends `paced` finds its rate.
    """
    count = max(8, round(REQUESTS[name] * scale))
    requests = _conversations(seed, count) if name == "trace" else _shared_beginnings(seed, count, 8 * engines)
    return Load(kv_tokens=KV_TOKENS[name], requests=tuple(requests), clients=CLIENTS.get(name, CLIENTS["shared"]))


def _shared_beginnings(seed: int, count: int, prefixes: int) -> Iterator[PlannedRequest]:
    """Yield requests with a short prompt of their own behind one of the beginnings, and short answers."""
    for number in range(count):
        chance = Random(f"{seed}/{number}")
        beginning = _words(f"{seed}/prefix/{chance.randrange(prefixes)}", PREFIX_WORDS)
        own = " ".join(chance.choices(WORDS, k=chance.randint(10, 30)))
        yield PlannedRequest(number, f"{beginning} {own}", chance.randint(2, 6))


def _conversations(seed: int, count: int) -> Iterator[PlannedRequest]:
    """Yield conversations that grow turn by turn, on a few system prompts, at regular times.

    The prompts consist of blocks, as in Mooncake's traces. Which conversation goes on when is the same for every seed;
    the words differ.
    """
    chance, fresh = Random(7), iter(range(100, 10**6))
    talks = [[*range(10 * system, 10 * system + 2)] for system in range(4)]  # the blocks of each system prompt
    running: list[list[int]] = []
    for number in range(count):
        if running and chance.random() < 0.6:
            talk = chance.choice(running)
        else:
            running.append(talk := list(chance.choice(talks)))
            del running[:-CONVERSATIONS_MAX]
        talk += [next(fresh) for _ in range(chance.randint(0, 1))]
        blocks = [*talk, next(fresh)]
        own, answer = chance.randint(2, 50), chance.randint(4, 12)
        words = " ".join(_words(f"{seed}/block/{block}", BLOCK_WORDS) for block in blocks).split()
        prompt = " ".join(words[: BLOCK_WORDS * len(talk) + own])
        yield PlannedRequest(number, prompt, answer, TRACE_EVERY_S * number)


@lru_cache(maxsize=4096)
def _words(seed: str, count: int) -> str:
    return " ".join(Random(seed).choices(WORDS, k=count))
