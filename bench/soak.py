"""Many requests of every kind on the real engine, a third of whose clients disconnect early: does anything grow?

Samples memory, file descriptors, threads, tasks and files of each process while nothing runs, once every `EVERY`
requests, and fits a line through the samples after the warm-up. Every complete answer must equal the first answer to
its prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, read_or_disconnect, response_body
from bench.rig.node import Node, metric, node, short_folder, wait_until
from bench.rig.processes import memory_bytes, open_files, threads
from bench.rig.prompts import PROMPTS
from bench.rig.trend import slope

LEAVE_SHARE = 0.39  # of the requests; about a fifth of them are answered before, so that 30 % really disconnect
LEAVES_WITHIN_S = 1.2  # about as long as an answer takes among fifteen others
LEAVING_S = 30.0  # in which the reader must notice the disconnect
EVERY = 100
WARM_UP = 0.25  # of all requests, in which allocators and caches fill
ROLES = ("node", "host", "scheduler")
Sample = dict[tuple[str, str], float]  # by process and measured quantity
# Of growth by 1,000 requests, of each process.
BOUNDS = {"MB": 6.0, "fds": 1.0, "threads": 1.0, "tasks": 1.0, "files": 0.5}


@dataclass
class Tally:
    """The outcomes so far, and sentences about the wrong ones."""

    texts: dict[str, str]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def note(self, kind: str, left: bool, prompt: str, outcome: Outcome) -> None:
        """Count one answer, and compare its text if it is complete."""
        category = "whole" if outcome.whole else "left" if left and _left(kind, outcome) else "failed"
        with self.lock:
            self.outcomes[f"{kind} {category}"] += 1
            if outcome.whole and outcome.text != self.texts[prompt]:
                self.wrong.append(f"{prompt!r} was answered {outcome.text!r}")
            if category == "failed":
                self.wrong.append(f"{kind} {prompt!r} failed: {outcome.error or outcome.finish}")


def _left(kind: str, outcome: Outcome) -> bool:
    """Whether an incomplete answer ended because its client disconnected or cancelled it."""
    if kind == "response.cancel":
        return outcome.finish == "cancelled" and outcome.error is None
    return outcome.error is None or outcome.error.get("code") == "connection"


# One request -----------------------------------------------------------------------------


def stream(port: int, prompt: str, leave_after_s: float | None) -> Outcome:
    """Request a stream over HTTP."""
    chat = Chat(port, chat_body(prompt))
    return read_or_disconnect(chat.read, chat.outcome, chat.leave, leave_after_s, LEAVING_S)


def whole(port: int, prompt: str, leave_after_s: float | None) -> Outcome:
    """Request an answer in one piece over HTTP."""
    chat = Chat(port, chat_body(prompt, stream=False))

    def read() -> None:
        body = chat.read_body()
        for choice in body.get("choices", ()):
            chat.outcome.text, chat.outcome.finish = choice["message"]["content"], choice["finish_reason"]

    return read_or_disconnect(read, chat.outcome, chat.leave, leave_after_s, LEAVING_S)


def response(port: int, prompt: str, leave_after_s: float | None) -> Outcome:
    """Request a response over a WebSocket."""
    socket, outcome = ResponsesSocket(port), Outcome()
    socket.send(response_body(prompt))
    read_or_disconnect(lambda: list(socket.events(outcome)), outcome, socket.leave, leave_after_s, LEAVING_S)
    if leave_after_s is None:
        socket.close()
    return outcome


def cancelled_response(port: int, prompt: str, leave_after_s: float | None) -> Outcome:
    """Request a response over a WebSocket, and cancel it with `response.cancel` instead of disconnecting."""
    socket, outcome = ResponsesSocket(port), Outcome()
    socket.send(response_body(prompt))

    def cancel() -> None:
        socket.send({"type": "response.cancel"})

    read_or_disconnect(lambda: list(socket.events(outcome)), outcome, cancel, leave_after_s, LEAVING_S)
    socket.close()
    return outcome


KINDS: dict[str, Callable[[int, str, float | None], Outcome]] = {
    "stream": stream,
    "whole": whole,
    "response": response,
    "response.cancel": cancelled_response,
}


def send_one(port: int, seed: int, tally: Tally) -> None:
    """Send the request of this seed, and count its answer."""
    chance = random.Random(seed)
    prompt, kind = chance.choice(PROMPTS), chance.choice(tuple(KINDS))
    leaves = chance.random() < LEAVE_SHARE
    leave_after_s = chance.random() ** 2 * LEAVES_WITHIN_S if leaves else None  # early moments more often
    try:
        outcome = KINDS[kind](port, prompt, leave_after_s)
    except Exception as error:  # noqa: BLE001  # any of them counts as a failure
        outcome = Outcome(error={"code": "client", "message": repr(error)})
    tally.note(kind, leaves, prompt, outcome)


# Measurements --------------------------------------------------------------------------


def sample(target: Node) -> Sample:
    """Measure every process of an idle node."""
    wait_until(lambda: target.metric("espalier_requests_running") == 0, 20.0, 0.02)
    time.sleep(0.3)
    values: Sample = {}
    living = target.observe()
    for role in ROLES:
        pid = living[role].pid
        values[role, "MB"] = memory_bytes(pid, "Rss") / 1e6
        values[role, "fds"] = open_files(pid)
        values[role, "threads"] = threads(pid)
    values["node", "tasks"] = target.metric("espalier_node_tasks")
    values["node", "files"] = sum(1 for _ in target.tmp.rglob("*")) + len(target.shared_memory)
    return values


def run(target: Node, requests: int, concurrency: int, seed: int) -> tuple[Tally, list[tuple[int, Sample]]]:
    """Send all requests, with a pause for a sample after every `EVERY`."""
    tally = Tally({prompt: Chat(target.port, chat_body(prompt)).read().text for prompt in PROMPTS})
    samples = [(0, sample(target))]
    with ThreadPoolExecutor(concurrency) as pool:
        for done in range(0, requests, EVERY):
            numbers = range(done, min(done + EVERY, requests))
            for _ in pool.map(lambda number: send_one(target.port, seed * 1_000_000 + number, tally), numbers):
                pass
            samples.append((numbers[-1] + 1, sample(target)))
            print(f"{numbers[-1] + 1:>6} {json.dumps(_short(samples[-1][1]))}", file=sys.stderr, flush=True)
    return tally, samples


def _short(values: Sample) -> dict[str, float]:
    return {" ".join(key): round(value, 1) for key, value in values.items()}


def main() -> int:
    """Run, print slopes and outcomes, and return 1 if anything grows or an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.requests < 2 * EVERY:
        parser.error(f"--requests must be at least {2 * EVERY}: a slope needs two samples after the warm-up")
    with short_folder() as folder, node(folder) as target:
        start = time.perf_counter()
        tally, samples = run(target, arguments.requests, arguments.concurrency, arguments.seed)
        took_s = time.perf_counter() - start
        text = target.get("/metrics")[1].decode()
    print(f"{arguments.requests} requests in {took_s:.0f} s, seed {arguments.seed}")
    print(dict(sorted(tally.outcomes.items())))
    print(f"restarts of children: {metric(text, 'espalier_child_restarts_total'):g}")
    bad = _slopes(samples, arguments.requests)
    held = {name: metric(text, f"espalier_engine_{name}") for name in ("running", "waiting", "kv_tokens_used")}
    print(f"at the end the engine holds {held}")
    for line in tally.wrong[:10]:
        print(f"WRONG: {line}")
    return 1 if bad or tally.wrong or any(held.values()) else 0


def _slopes(samples: list[tuple[int, Sample]], requests: int) -> bool:
    bad = False
    head = f"{'process':<12}{'what':<10}{'at first':>10}{'after warm-up':>15}"
    print(f"{head}{'at the end':>12}{'by 1,000':>10}{'bound':>8}")
    warm = [(count, values) for count, values in samples if count >= WARM_UP * requests]
    for role, what in samples[0][1]:
        grows = slope([(count, values[role, what]) for count, values in warm])
        bound = BOUNDS[what]
        first, begin, end = (each[1][role, what] for each in (samples[0], warm[0], warm[-1]))
        verdict = "" if grows <= bound else "  GROWS"
        print(f"{role:<12}{what:<10}{first:>10.1f}{begin:>15.1f}{end:>12.1f}{grows:>10.2f}{bound:>8.1f}{verdict}")
        bad = bad or grows > bound
    return bad


if __name__ == "__main__":
    sys.exit(main())
