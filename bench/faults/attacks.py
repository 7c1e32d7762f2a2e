"""Attacks from outside, each beside an honest client, which may lose no answer and wait for no token.

An attack is legal or nearly so: large answers, slow readers, unfinished heads, workers that fail. Beside each, an
honest client with a key of its own streams answers (`honest_client`). None of them may be lost, and no gap between two
of their tokens may be longer than the engine's own by more than `GAP_S_MAX`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

from attrs import define, field

from bench.faults.scenario import Run
from bench.faults.slowdown import attacking
from bench.rig.clients import headers, write_keys
from bench.rig.cluster import Cluster, Plan, cluster, simulated
from bench.rig.node import MODEL, ROOT, SIMULATED, Node, free_port, node, start_process
from bench.rig.processes import MARK, memory_max_mb

COLUMNS = ("attack", "held", "own gap ms", "worst", "first", "whole", "lost", "result")
GAP_S_MAX = 0.25
GATEWAY = 'requests_max = 512\nwaiting_max = 1024\nkeys = "{keys}"\n'
HONEST, ATTACKER = "honest-secret-of-the-bench-000001", "attacker-secret-of-the-bench-0001"
UNDISTURBED_S = 4.0  # before each attack, in which the engine's own gaps are measured
ENDS_WITHIN_S = 40.0  # of the honest client, whose answers last 3 s, and of the node
TIMEOUT_S = 60.0
COSTS = {"fixed_s": 0.05}
STOPPED_GAP_S_MAX = 3.5  # silent_s, and the time to continue on another worker


@define
class Verdict:
    """The figures of the honest client beside one attack; times in milliseconds."""

    own_gap_ms: float = 0.0  # of the engine: the median before the attack
    worst_gap_ms: float = 0.0
    worst_first_ms: float = 0.0
    whole: int = 0
    gap_s_max: float = GAP_S_MAX  # by which a gap may be longer than the engine's own
    lost: list[str] = field(factory=list)
    wrong: list[str] = field(factory=list)  # other promises that were broken
    result: str = ""  # of the attack itself, in words

    @property
    def held(self) -> bool:
        """Whether every promise was kept: nothing lost, nothing wrong, no gap too long."""
        return not (self.lost or self.wrong) and self.worst_gap_ms - self.own_gap_ms <= 1000 * self.gap_s_max

    def conclude(self, result: str, *, kept: bool = True) -> None:
        """Set the result of the attack; it counts as wrong unless its own promise was kept."""
        self.result = result
        if not kept:
            self.wrong.append(result)

    def judge(self, measured: dict[str, Any], attack_at: float) -> None:
        """Fill in the client's measurements; the attack began at `attack_at` by the same clock."""
        own = [gap for at, gap in measured["gaps"] if at < attack_at]
        during = [gap for at, gap in measured["gaps"] if at >= attack_at]
        self.own_gap_ms = 1000 * median(own or [0.0])
        self.worst_gap_ms = 1000 * max(during, default=0.0)
        self.worst_first_ms = 1000 * max((first for at, first in measured["firsts"] if at >= attack_at), default=0.0)
        self.whole += len(measured["whole"])
        self.lost += measured["lost"]
        if not during:
            self.wrong.append("the honest client got no token during the attack")


Attack = Callable[[Path, Verdict], None]


def attack_beside(run: Run, name: str, attack: Attack) -> None:
    """Run one attack, and add its row."""
    verdict = Verdict()
    try:
        attack(run.folder, verdict)
    except Exception as error:  # noqa: BLE001  # the row has what was measured
        traceback.print_exc()
        verdict.wrong.append(repr(error)[:200])
    times = (verdict.own_gap_ms, verdict.worst_gap_ms, verdict.worst_first_ms)
    words = "; ".join(filter(None, (verdict.result, *verdict.wrong)))
    run.row(name, "yes" if verdict.held else "NO", *times, verdict.whole, len(verdict.lost), words)
    run.check(verdict.held, f"{name}: {[*verdict.wrong, *verdict.lost[:3]] or 'a gap was too long'}")


@contextmanager
def beside_honest_client(
    folder: Path, port: int, verdict: Verdict, key: str = HONEST, tokens: int = 60
) -> Iterator[None]:
    """Run the honest client before and while the body attacks, and fill in the verdict.

    Its streams have so many `tokens` each.
    """
    out = folder / f"honest-{port}.json"
    command = [sys.executable, "-m", "bench.faults.honest_client", str(port), str(out), key, str(tokens)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            client.stdout.readline()
            time.sleep(UNDISTURBED_S)
            attack_at = time.perf_counter()
            yield
            client.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                client.wait(ENDS_WITHIN_S)
        finally:
            client.kill()
    if out.exists():
        verdict.judge(json.loads(out.read_text()), attack_at)
    else:
        verdict.lost.append(f"an answer did not end within {ENDS_WITHIN_S:g} s after the attack")


@contextmanager
def attacked_node(
    folder: Path,
    verdict: Verdict,
    *,
    slots: int = 256,
    engine: str = SIMULATED,
    while_draining: Callable[[], object] = lambda: None,
) -> Iterator[Node]:
    """Run a node with the honest client beside it while the body attacks; end it by SIGTERM.

    `while_draining` runs after the signal.
    """
    keys = write_keys(folder, {"honest": HONEST, "attacker": ATTACKER})
    with node(folder, slots=slots, engine=engine, gateway=GATEWAY.format(keys=keys)) as target:
        with beside_honest_client(folder, target.port, verdict):
            yield target
        if target.process.poll() is None:
            target.signal(signal.SIGTERM)
        while_draining()
        if target.wait_exit(ENDS_WITHIN_S) is None:
            verdict.wrong.append(f"SIGTERM did not end the node within {ENDS_WITHIN_S:g} s")
        elif target.process.returncode != 0:
            verdict.wrong.append(f"the node ended with {target.process.returncode}")


def post(port: int, path: str, body: object, key: str = ATTACKER, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of one POST; status 0, with the error, if there was no whole answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers(key))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


# Attacks on one node by requests ---------------------------------------------------------


def big_answers(folder: Path, verdict: Verdict) -> None:
    """Request 96 choices with 20 log probabilities a token, in one piece."""
    body = {"model": MODEL, "prompt": "x", "n": 96, "max_tokens": 160, "logprobs": 20, "ignore_eos": True}
    with attacked_node(folder, verdict) as target:
        status, answer = post(target.port, "/v1/completions", body)
        verdict.conclude(f"{status}, {len(answer) / 1e6:.1f} MB")


def huge_prompts(folder: Path, verdict: Verdict) -> None:
    """Send 24 prompts of 4 MB at once, again and again, beside a client with prompts of 3,000 characters."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a" * 4_000_000}]}).encode()
    long_prompt = {"model": MODEL, "prompt": "the oak " * 375, "max_tokens": 2}
    took_s: list[float] = []
    with attacked_node(folder, verdict) as target:

        def attack(over: Event) -> None:
            while not over.is_set():
                post(target.port, "/v1/chat/completions", body)

        with attacking(attack, threads=24):
            began = time.monotonic()
            while time.monotonic() - began < 10.0:
                sent_at = time.monotonic()
                status, answer = post(target.port, "/v1/completions", long_prompt, HONEST)
                took_s.append(time.monotonic() - sent_at)
                if status != 200:
                    verdict.lost.append(f"{status}: {answer[:100]!r}")
        memory_mb = memory_max_mb(target.pid)
    result = f"a long prompt of another key took at most {max(took_s):.2f} s; VmHWM {memory_mb:.0f} MB"
    verdict.conclude(result, kept=max(took_s) <= 2.0)


def greedy_key(folder: Path, verdict: Verdict) -> None:
    """Send requests with one key for 128 choices, four at once, to an engine with 16 slots."""
    body = {"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 40, "ignore_eos": True}
    with attacked_node(folder, verdict, slots=16) as target, attacking(_posting(target, body), threads=4, join=False):
        time.sleep(15.0)
    # The fair share of a key is one of two: a slot is free within 40 tokens of 50 ms.
    _conclude_first_token(verdict, first_ms_max=5_000)


def long_prompts(folder: Path, verdict: Verdict) -> None:
    """Send requests with one key for 100 prompts of 6,000 tokens, three at once, to an engine with 32 slots."""
    priced = SIMULATED.replace("per_prefill_token_s = 0.0", "per_prefill_token_s = 0.00005")
    bodies = []
    for client in range(3):
        prompts = [[1 + (client * 7 + number * 13 + place) % 250 for place in range(6_000)] for number in range(100)]
        bodies.append({"model": MODEL, "prompt": prompts, "max_tokens": 8, "ignore_eos": True})
    with (
        attacked_node(folder, verdict, slots=32, engine=priced) as target,
        attacking(_posting(target, *bodies), threads=3, join=False),
    ):
        time.sleep(15.0)
    # The prompt that is being computed and one turn take a second together.
    _conclude_first_token(verdict, first_ms_max=3_000)


def _posting(target: Node, *bodies: object) -> Callable[[Event], None]:
    """Return an attack that posts one body again and again; its threads take the bodies in turn."""
    encoded = cycle([json.dumps(body).encode() for body in bodies])

    def attack(over: Event) -> None:
        data = next(encoded)
        while not over.is_set():
            if post(target.port, "/v1/completions", data)[0] != 200:
                over.wait(0.2)

    return attack


def _conclude_first_token(verdict: Verdict, first_ms_max: float) -> None:
    result = f"worst first token of the other key {verdict.worst_first_ms / 1000:.2f} s"
    verdict.conclude(result, kept=verdict.worst_first_ms <= first_ms_max)


# Faults of a cluster ---------------------------------------------------------------------


@contextmanager
def attacked_cluster(folder: Path, verdict: Verdict, workers: int, **faults: str) -> Iterator[Cluster]:
    """Run a cluster with the honest client beside it while the body attacks.

    `faults` are lines of the engine's table `faults`, by worker.
    """
    engines = {f"w{number}": simulated(f"w{number}", slots=16, costs=COSTS) for number in range(workers)}
    for name, lines in faults.items():
        engines[name] += f"\n[engine.tiny-{name}.simulated.faults]\n{lines}\n"
    plan = Plan(engines, drain_s=2.0, front_drain_s=20.0)  # without keys, which the metrics would need
    with cluster(folder, plan) as target, beside_honest_client(folder, target.front.port, verdict, key=""):
        yield target


def twins(folder: Path, verdict: Verdict) -> None:
    """Start a second process with the name of a living node."""
    with attacked_cluster(folder, verdict, 2) as target:
        twin_folder = target.folder / "twin"
        (twin_folder / "t").mkdir(parents=True)
        text = target.file("w0").replace(f"127.0.0.1:{target.link_ports['w0']}", f"127.0.0.1:{free_port()}")
        text = text.replace(f"port = {target.gateway_ports['w0']}", f"port = {free_port()}")
        (twin_folder / "cluster.toml").write_text(text)
        with (twin_folder / "output").open("wb") as output:
            arguments = ["--node", "w0", str(twin_folder / "cluster.toml")]
            twin = start_process(arguments, output, {"TMPDIR": str(twin_folder / "t"), MARK: "twin"})
        try:
            time.sleep(15.0)
        finally:
            twin.kill()
            twin.wait()
        logs = (twin_folder / "output").read_text() + target.nodes["w0"].output() + target.front.output()
        verdict.conclude("a log has the reason" if "two processes call themselves" in logs else "no log has the reason")


def black_hole(folder: Path, verdict: Verdict) -> None:
    """Let one worker of four fail every request at once."""
    with attacked_cluster(folder, verdict, 4, w0="refuse = 1.0"):
        time.sleep(12.0)
    # The first requests may fail before the worker is ejected.
    failed = [reason for reason in verdict.lost if "engine_refused" in reason or "internal" in reason]
    verdict.conclude(f"{len(failed)} of {len(failed) + verdict.whole} failed")
    if len(failed) <= 5:
        verdict.lost = [reason for reason in verdict.lost if reason not in failed]


def stopped_node(folder: Path, verdict: Verdict) -> None:
    """Stop a worker's process for six seconds: its kernel still acknowledges, it does not answer."""
    verdict.gap_s_max = STOPPED_GAP_S_MAX  # a stopped process is noticed by its silence alone
    with attacked_cluster(folder, verdict, 3) as target:
        target.nodes["w0"].signal(signal.SIGSTOP)
        time.sleep(6.0)
        target.nodes["w0"].signal(signal.SIGCONT)
        time.sleep(4.0)


BY_REQUESTS: dict[str, Attack] = {
    "big-answers": big_answers,
    "huge-prompts": huge_prompts,
    "greedy-key": greedy_key,
    "long-prompts": long_prompts,
    "twins": twins,
    "black-hole": black_hole,
    "stopped-node": stopped_node,
}


def attacks(run: Run, by_connections: Mapping[str, Attack]) -> None:
    """Run the chosen attacks."""
    every = {**BY_REQUESTS, **by_connections}
    run.each({name: partial(attack_beside, name=name, attack=attack) for name, attack in every.items()})
