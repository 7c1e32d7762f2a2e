"""Loads whose prompts share their beginnings, and what came of them.

Each names the memory of an engine that makes it worth routing: engines together have the memory for all that is shared,
and none has it alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random

from attrs import define, evolve, field, frozen

from bench.load import measure
from bench.load.messages import Job, Record, Target
from bench.load.plan import WORDS, Pace, PlannedRequest, Workload
from bench.load.process import run_to_end
from bench.peers import espalier as espalier_server
from bench.peers.mock_model import mock_model
from bench.peers.peer import MODEL, MODEL_FOLDER, Command, Engine, Peer, Setup

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


def send(url: str, load: Load, *, exact: bool = False, reuse: bool = True) -> list[Record]:
    """Send a load once; raises `Failed` if a request fails. With `exact` every answer has its full length."""
    target = Target(url=url, api="chat", model=MODEL, ignore_eos=exact, reuse=reuse)
    workload = Workload(requests=load.requests)
    return run_to_end([Job(target=target, workload=workload, pace=Pace(clients=load.clients))]).records


@define
class Figures:
    """The figures of one policy or router, one value a round."""

    hit_share: list[float] = field(factory=list)
    ttft_p50_ms: list[float] = field(factory=list)
    ttft_p99_ms: list[float] = field(factory=list)
    tokens_s: list[float] = field(factory=list)

    def add(self, records: Sequence[Record], cached: float, prompts: float) -> None:
        """Add a round: its answers, and how many of the prompt tokens were found in a cache."""
        first = measure.latencies(records)["ttft"]
        self.hit_share.append(cached / prompts)
        self.ttft_p50_ms.append(first.p50 or 0.0)
        self.ttft_p99_ms.append(first.p99 or 0.0)
        self.tokens_s.append(measure.rates(records, measure.window(records))["output_tokens_per_s"])

    def cells(self) -> list[list[float]]:
        """Return the cells of a row below `COLUMNS`."""
        return [[100 * share for share in self.hit_share], self.ttft_p50_ms, self.ttft_p99_ms, self.tokens_s]

    def words(self) -> str:
        """Return the medians in a few words."""
        share, p50, p99, rate = map(statistics.median, self.cells())
        return f"{share:.1f} % cached, TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms, {rate:.0f} tokens/s"


COLUMNS = ("cached, %", "TTFT p50, ms", "p99, ms", "tokens/s")


def add_arguments(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add the arguments that benches of routing share."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="a factor for the number of requests")
    parser.add_argument("--loads", nargs="*", choices=NAMES, default=list(default))
