"""Attacks on one node by requests: large answers, long prompts, a greedy key, crashing engines, unread logs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from threading import Event

from bench.attacks.scenario import HONEST, Verdict, attacked_node, attacking, post
from bench.rig.node import MODEL, SIMULATED, Node
from bench.rig.processes import memory_max_mb

UNREAD_REQUESTS = 400  # a pipe is full after some 140 lines


def big_answers(folder: Path, verdict: Verdict) -> None:
    """Request 96 choices with 20 log probabilities a token, in one piece."""
    body = {"model": MODEL, "prompt": "x", "n": 96, "max_tokens": 160, "logprobs": 20, "ignore_eos": True}
    with attacked_node(folder, verdict) as target:
        status, answer = post(target.port, "/v1/completions", body)
        verdict.conclude(f"{status}, {len(answer) / 1e6:.1f} MB")


def unread_logs(folder: Path, verdict: Verdict) -> None:
    """Leave the node's standard error unread, so that its pipe is full."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    reads, writes = os.pipe()
    try:
        with attacked_node(folder, verdict, output=writes) as target:
            answered = 0
            while answered < UNREAD_REQUESTS and post(target.port, "/v1/completions", body, timeout_s=5.0)[0] == 200:
                answered += 1
        verdict.conclude(f"{answered} of {UNREAD_REQUESTS} answered", kept=answered == UNREAD_REQUESTS)
    finally:
        os.close(reads)
        os.close(writes)


def crashing_neighbours(folder: Path, verdict: Verdict) -> None:
    """Let three engines of the same node crash again and again."""
    crashing = "".join(
        f'[model.bad{number}]\npath = "{Path("examples/tiny").resolve()}"\n'
        f'[engine.bad{number}]\nmodel = "bad{number}"\nkind = "simulated"\nkv_tokens_max = 65536\n'
        f"[engine.bad{number}.simulated.faults]\ncrash_after_s = 0.3\n"
        for number in range(3)
    )
    with attacked_node(folder, verdict, engine=SIMULATED + crashing) as target:
        time.sleep(20.0)
        verdict.conclude(f"{restarts(target)} restarts")


def restarts(target: Node) -> int:
    """Return the number of restarts in a node's log; its metrics need a key."""
    return target.output().count('"child_event": "restarting"')


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
