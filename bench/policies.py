"""The routing policies beside each other, on the same engines and the same load, one after the other in turns.

Two or three engines have together the memory for all that the load shares, and none has it alone. For each policy in
turn the node is started anew, with empty caches, and the load is sent. Then one engine with all the
memory gets the same load: more than it finds in its cache no routing can find. Reported are, for each policy, the share
of prompt tokens that were found in a cache, the times to the first token, the throughput, how often the router's
prediction of what would be found was right, and how many of the others were more than a page away.

`python -m bench.policies` takes some minutes; `--engines simulated` needs no real engine. `--kill-after 60` kills the
scheduler of an engine once so many requests of each load have ended: its cache is lost, and the engine comes back.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from bench.rig.node import MODEL, ROOT, Node, free_port, short_folder, start_process, wait_until
from bench.rig.processes import MARK

POLICIES = ("round_robin", "random_two", "least_loaded", "session", "kv")
REFERENCE = "one engine"
SETTLED_S = 1.0  # after a start or a load
LOAD_WITHIN_S = 600.0
KILLED_WITHIN_S = 10.0
BACK_WITHIN_S = 120.0
FILE = """\
[gateway]
port = {port}
requests_max = 512
[model.{model}]
path = "{path}"
policy = "{policy}"
queue_max = 256
kv = {{ {kv} }}
{engines}
"""
ENGINE = """\
[engine.e{number}]
model = "{model}"
slots = {slots}
kv_tokens_max = {kv_tokens}
events.publish = true
{kind}
"""
PACE_SHARE = 0.4  # of what engines chosen in turn answer in a closed loop; with it every policy keeps up
PACE_REQUESTS = 100  # sent to find it
PAGE = 16  # tokens; the default of `page_size`
KINDS = {
    "sglang": 'device = "cpu"',
    "simulated": 'kind = "simulated"\nsimulated.costs = { fixed_s = 0.01, per_prefill_token_s = 0.0002 }',
}


@frozen
class Load:
    """One load, as words for `bench load`, and the memory of each engine that makes it worth routing.

    Of a `paced` load the requests arrive at random, at a rate that is found before it is sent.
    """

    words: tuple[str, ...]
    kv_tokens: int
    paced: bool = False


def loads(folder: Path, scale: float, engines: int = 2) -> dict[str, Load]:
    """Return the loads for so many engines by name; `scale` is a factor for the number of their requests."""

    def many(number: int) -> str:
        return str(max(8, round(number * scale)))

    trace = folder / "trace.jsonl"
    trace.write_text(mooncake_trace(max(40, round(160 * scale))))
    shared = (
        "--prefixes",
        str(8 * engines),
        "--prefix-tokens",
        "1000",
        "--prompt-tokens",
        "10:30",
        "--output-tokens",
        "2:6",
    )
    turns = ("--turns", "4:6", "--prompt-tokens", "40:80", "--output-tokens", "8:16")
    return {
        "shared": Load((*shared, "--clients", "4", "--requests", many(200)), 20_000),
        "paced": Load((*shared, "--requests", many(300)), 20_000, paced=True),
        "turns": Load((*turns, "--clients", "6", "--requests", many(40)), 7_000),
        "trace": Load(("--trace", str(trace), "--trace-scale", "0.1", "--clients", "6"), 7_000),
    }


def mooncake_trace(requests: int, seed: int = 7) -> str:
    """Return a trace in Mooncake's form: conversations that grow turn by turn, on a few system prompts."""
    chance, block, lines = Random(seed), iter(range(100, 10**6)), list[str]()
    talks = [[*range(10 * system, 10 * system + 2)] for system in range(4)]  # the blocks of each system prompt
    running: list[list[int]] = []
    for number in range(requests):
        if running and chance.random() < 0.6:
            talk = chance.choice(running)
        else:
            running.append(talk := list(chance.choice(talks)))
            del running[:-12]
        talk += [next(block) for _ in range(chance.randint(0, 1))]
        own = chance.randint(20, 500)
        fields = {
            "timestamp": 200 * number,
            "input_length": 512 * len(talk) + own,
            "output_length": chance.randint(40, 120),
            "hash_ids": [*talk, next(block)],
        }
        lines.append(json.dumps(fields))
    return "\n".join(lines)


@define
class Figures:
    """The figures of one policy, one value a round."""

    hit_share: list[float] = field(factory=list)
    ttft_p50_ms: list[float] = field(factory=list)
    ttft_p99_ms: list[float] = field(factory=list)
    tokens_s: list[float] = field(factory=list)
    equal: float = 0.0
    predicted: float = 0.0
    differences: list[int] = field(factory=list)  # tokens found more than predicted, where they are more than a page

    def row(self) -> str:
        """Return the medians as a line of a table."""
        medians = [statistics.median(values) for values in (self.hit_share, self.ttft_p50_ms, self.ttft_p99_ms)]
        right = f"{'-':>8}"
        if self.predicted:
            right = f"{100 * self.equal / self.predicted:6.1f} % {len(self.differences):5}"
        return "{:8.1%} {:9.1f} {:9.1f}".format(*medians) + f" {statistics.median(self.tokens_s):8.0f} {right}"


@define
class Cluster:
    """One node with engines, which is started anew for each policy."""

    folder: Path
    port: int
    text: str
    engines: int
    started: Node | None = None

    def choose(self, policy: str) -> None:
        """Start the node with a routing policy and with empty caches."""
        self.end()
        tmp, file, mark = self.folder / f"t{self.port}", self.folder / f"{self.port}.toml", f"policies-{self.port}"
        tmp.mkdir(exist_ok=True)
        file.write_text(re.sub(r'policy = "\w+"', f'policy = "{policy}"', self.text))
        with (self.folder / "output").open("wb") as output:
            process = start_process([str(file)], output, {"TMPDIR": str(tmp), MARK: mark, "OMP_NUM_THREADS": "1"})
        self.started = Node(process, self.port, self.folder, tmp, mark, time.perf_counter())
        self.node.wait_ready(180.0)
        wait_until(lambda: self.metric("espalier_engine_up") >= self.engines, 120.0, every_s=0.2)
        time.sleep(SETTLED_S)

    def end(self) -> None:
        """End the node that runs, if any, whatever happens."""
        if self.started is not None:
            self.started.end()
            self.started = None

    @property
    def node(self) -> Node:
        """The node that runs."""
        assert self.started is not None
        return self.started

    @property
    def url(self) -> str:
        """The URL at which the node is asked."""
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of the node."""
        return self.node.metric(name, **labels)


@contextmanager
def cluster(folder: Path, kind: str, engines: int, kv_tokens: int, slots: int, kv: str) -> Iterator[Cluster]:
    """Yield a node with so many engines, each with so much KV memory; it is ended whatever happens."""
    port = free_port()
    text = FILE.format(
        port=port,
        model=MODEL,
        path=ROOT / "examples" / MODEL,
        policy="kv",
        kv=kv,
        engines="".join(
            ENGINE.format(number=number, model=MODEL, slots=slots, kv_tokens=kv_tokens, kind=KINDS[kind])
            for number in range(engines)
        ),
    )
    running = Cluster(folder, port, text, engines)
    try:
        yield running
    finally:
        running.end()


def differences(log: str) -> list[int]:
    """Return by how many tokens more was found than predicted, of each request in an access log that told both."""
    lines = [json.loads(line) for line in log.splitlines() if '"overlap_tokens":' in line]
    return [
        line["cached_tokens"] - line["overlap_tokens"]
        for line in lines
        if None not in (line["cached_tokens"], line["overlap_tokens"])
    ]


@contextmanager
def killed(running: Cluster, after: int) -> Iterator[None]:
    """Kill the scheduler of an engine once so many requests have ended, and wait in the end until it is back."""
    if not after:
        yield
        return
    before, engines = running.metric("espalier_requests_total"), running.metric("espalier_engine_up")
    load_over = Event()

    def ended() -> float:
        return running.metric("espalier_requests_total") - before

    def kill() -> None:
        wait_until(lambda: load_over.is_set() or ended() >= after, LOAD_WITHIN_S, every_s=0.1)
        if load_over.is_set():
            raise RuntimeError(f"the load was over before {after} of its requests had ended")
        running.node.kill("scheduler")
        wait_until(lambda: running.metric("espalier_engine_up") < engines, KILLED_WITHIN_S, every_s=0.02)

    with ThreadPoolExecutor(1) as killer:
        done = killer.submit(kill)
        try:
            yield
        finally:
            load_over.set()
    done.result()
    if wait_until(lambda: running.metric("espalier_engine_up") >= engines, BACK_WITHIN_S, every_s=0.2) is None:
        raise RuntimeError("the engine that was killed did not come back")


def send(url: str, words: Sequence[str], seed: int, folder: Path) -> dict[str, Any]:
    """Send a load once, given as words for `bench load`, and return the document of what that has measured."""
    result = folder / "load.json"
    to = ("--seed", str(seed), "--url", url, "--model", MODEL)
    subprocess.run(
        [sys.executable, "-m", "bench", "load", *words, *to, "--json", str(result), "--quiet"],
        cwd=ROOT,
        check=True,
        timeout=LOAD_WITHIN_S,
        stdout=subprocess.DEVNULL,
    )
    document: dict[str, Any] = json.loads(result.read_text())
    return document


def pace(running: Cluster, load: Load, folder: Path) -> Load:
    """Return a paced load with the rate of arrivals that suits this machine, in requests a second.

    A rate that one machine keeps up with overloads another, and then times to the first token and shares of what is
    cached tell of waiting and of evictions instead of routing.
    """
    closed_loop = (*load.words, "--clients", "4", "--requests", str(PACE_REQUESTS))
    running.choose("round_robin")
    answered_s: float = send(running.url, closed_loop, 0, folder)["rates"]["requests_per_s"]
    rate = round(PACE_SHARE * answered_s, 2)
    sys.stderr.write(f"{rate} requests a second arrive: {PACE_SHARE:.0%} of {answered_s:.2f} in a closed loop\n")
    return evolve(load, words=(*load.words, "--rate", str(rate)))


def measure(
    running: Cluster, load: Load, seed: int, policy: str, figures: Figures, folder: Path, kill_after: int
) -> None:
    """Send a load once, and add what came of it."""

    def counts() -> dict[str, float]:
        names = {"input": "espalier_tokens_total", "cached": "espalier_tokens_total"}
        found = {kind: running.metric(name, kind=kind) for kind, name in names.items()}
        outcomes = "espalier_routing_predictions_total"
        return {
            **found,
            "equal": running.metric(outcomes, outcome="equal"),
            "predicted": running.metric(outcomes),
        }

    before, logged = counts(), len(running.node.output())
    with killed(running, kill_after):
        document = send(running.url, load.words, seed, folder)
    time.sleep(SETTLED_S)
    after = counts()
    change = {name: after[name] - before[name] for name in after}
    figures.hit_share.append(change["cached"] / change["input"])
    if policy == "kv":  # others expect nothing
        figures.equal += change["equal"]
        figures.predicted += change["predicted"]
        found = differences(running.node.output()[logged:])
        figures.differences += [number for number in found if abs(number) > PAGE]
    ttft = document["latencies"]["ttft"]
    figures.ttft_p50_ms.append(ttft["p50"])
    figures.ttft_p99_ms.append(ttft["p99"])
    figures.tokens_s.append(document["rates"]["output_tokens_per_s"])


def compare(
    name: str,
    load: Load,
    kind: str,
    engines: int,
    rounds: int,
    slots: int,
    policies: Sequence[str],
    kv: str,
    kill_after: int,
) -> dict[str, Figures]:
    """Return what each policy reached on a load, and one engine with all the memory, which is never killed."""
    table = {policy: Figures() for policy in (*policies, REFERENCE)}
    with short_folder() as folder:
        with cluster(folder, kind, engines, load.kv_tokens, slots, kv) as running:
            if load.paced:
                load = pace(running, load, folder)
            for number in range(rounds):
                for policy in policies if number % 2 == 0 else policies[::-1]:
                    running.choose(policy)
                    measure(running, load, number, policy, table[policy], folder, kill_after)
                    sys.stderr.write(f"{name} {policy} round {number}: {table[policy].row()}\n")
        with cluster(folder, kind, 1, engines * load.kv_tokens, engines * slots, kv) as running:
            for number in range(rounds):
                running.choose("kv")
                measure(running, load, number, "kv", table[REFERENCE], folder, 0)
    return table


def main(words: Sequence[str]) -> None:
    """Print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", choices=KINDS, default="sglang")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--loads", nargs="*", default=["shared", "paced", "turns", "trace"])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--kv", default="", metavar="KEYS", help="of [model.NAME.kv], as `load_tokens = 64`")
    parser.add_argument("--kill-after", type=int, default=0, metavar="REQUESTS", help="kill a scheduler in each load")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every round's figures, by load and policy")
    options = parser.parse_args(words)
    if options.kill_after and options.engines != "sglang":
        parser.error("a simulated engine has no scheduler to kill")
    measured: dict[str, dict[str, object]] = {}
    with short_folder() as folder:
        every = loads(folder, options.scale, options.count)
        for name in options.loads:
            engines = options.engines, options.count
            how = options.rounds, options.slots, options.policies, options.kv, options.kill_after
            table = compare(name, every[name], *engines, *how)
            sys.stdout.write(f"\n{name}: {options.count} engines ({options.engines}), medians of {options.rounds}\n")
            titles = f"{'':14}{'cached':>8} {'TTFT p50':>9} {'p99 ms':>9} {'tokens/s':>8}"
            sys.stdout.write(f"{titles} {'predicted':>8} {'> page':>6}\n")
            for policy, figures in table.items():
                sys.stdout.write(f"{policy:14}{figures.row()}\n")
            measured[name] = {policy: asdict(figures) for policy, figures in table.items()}
    if options.json:
        document = {"kind": options.engines, "engines": options.count, "rounds": options.rounds, "loads": measured}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
