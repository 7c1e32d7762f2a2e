"""How long after a client has left its request is out of the engine, by the engine's own count.

For each try a client closes its connection at a given moment, and `/metrics`, which reads the engine's count anew at
each scrape, is polled over a connection that is kept. The time is that of the first scrape after which the engine ran
nothing, had nothing waiting and held no KV memory for running requests, for good: an engine that has not yet heard of a
request counts nothing for it either, so polling goes on until the node itself has ended the request and `SETTLE_S` have
passed. Nothing is subtracted for the polling; its period is printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import Node, metric, node, place
from bench.rig.prompts import STORY_PROMPT

TARGET_P90_MS = 60.0
TOKENS = 1000  # more than any try lets its answer have
SETTLE_S = 0.15
PAUSE_S = 0.002  # between two polls: a client, a node and a host that never rest would take a core of two
GIVE_UP_S = 10.0
COUNTS = ("espalier_engine_running", "espalier_engine_waiting", "espalier_engine_kv_tokens_used")
WORDS = "the old oak by the river tells the quiet fox a story of apples and rain and bread "


@dataclass
class Poll:
    """Reads the engine's count as fast as the node answers."""

    connection: HTTPConnection
    periods: list[float] = field(default_factory=list)

    def busy(self) -> tuple[bool, bool]:
        """Return whether the engine holds anything, and whether the node still answers anybody."""
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        self.connection.request("GET", "/metrics")
        text = self.connection.getresponse().read().decode()
        self.periods.append(time.perf_counter() - start + PAUSE_S)
        counts = [metric(text, name) for name in COUNTS]
        assert COUNTS[0] in text, "the engine was not asked"
        return any(counts), metric(text, "espalier_requests_running") > 0

    def until_idle(self, since: float) -> float:
        """Return how long after `since` the engine had become idle for good, in seconds."""
        idle_at, quiet_since = None, None
        while True:
            engine, gateway = self.busy()
            now = time.perf_counter()
            if engine:
                idle_at = None
            elif idle_at is None:
                idle_at = now
            if engine or gateway:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            if idle_at is not None and quiet_since is not None and now - quiet_since > SETTLE_S:
                return idle_at - since
            if now - since > GIVE_UP_S:
                raise RuntimeError(f"{GIVE_UP_S} s after its client had left, a request was still there")


def prompt_of(tokens: int, number: int) -> str:
    """Return a prompt of about so many tokens, which no cache knows."""
    if tokens < 50:
        return f"{number % 100}"  # with the chat template's own, about 8
    return f"{number} " + WORDS * (tokens // PROMPT_TOKENS_A_LINE)


PROMPT_TOKENS_A_LINE = 33


# One try ---------------------------------------------------------------------------------


def leave_chat(target: Node, prompt: str, pause_s: float, pieces: int) -> float:
    """Ask over HTTP and leave; return when."""
    chat = Chat(target.port, chat_body(prompt, TOKENS))
    if pieces:
        for _ in chat.events():
            if chat.outcome.pieces >= pieces:
                break
    time.sleep(pause_s)
    left_at = time.perf_counter()
    chat.leave()
    return left_at


def leave_socket(target: Node, prompt: str, pause_s: float, pieces: int) -> float:
    """Ask over a WebSocket and leave; return when."""
    socket = ResponsesSocket(target.port)
    socket.send(response_body(prompt, TOKENS))
    outcome = Outcome()
    if pieces:
        for _ in socket.events(outcome):
            if outcome.pieces >= pieces:
                break
    time.sleep(pause_s)
    left_at = time.perf_counter()
    socket.leave()  # no more: the polling must begin at once
    return left_at


# What is printed -------------------------------------------------------------------------

LEAVES: dict[str, Callable[[Node, str, float, int], float]] = {"HTTP": leave_chat, "WebSocket": leave_socket}


def moments(first_token_s: float) -> dict[str, tuple[float, int]]:
    """Return when to leave: within how many seconds, after which piece of text."""
    return {
        "before registration": (0.0, 0),
        "before the first token": (first_token_s, 0),
        "at token 10": (0.0, 10),
    }


def first_token(target: Node, tokens: int) -> tuple[float, int]:
    """Return how long a first token of such a prompt takes, in seconds, and how many tokens the prompt really has."""
    taken, size = [], 0
    for number in range(5):
        start = time.perf_counter()
        body = chat_body(prompt_of(tokens, 90_000 + number), 2, stream_options={"include_usage": True})
        outcome = Chat(target.port, body).read()
        assert outcome.first_at is not None
        assert outcome.usage is not None
        taken.append(outcome.first_at - start)
        size = outcome.usage["prompt_tokens"]
    return statistics.median(taken), size


def main() -> int:
    """Print the table; return 1 if a p90 misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=50)
    arguments = parser.parse_args()
    missed = 0
    with place() as folder, node(folder) as target:
        Chat(target.port, chat_body(STORY_PROMPT)).read()  # a first request is slower than any other
        poll = Poll(HTTPConnection("127.0.0.1", target.port, timeout=GIVE_UP_S))
        print("from the client's close to an idle engine, in ms")
        print(f"{'door':<12}{'moment':<24}{'prompt':>8}{'tries':>7}{'p50':>8}{'p90':>8}{'max':>8}")
        number, chance = 0, random.Random(20)
        for tokens in (8, 1500):
            first_token_s, size = first_token(target, tokens)
            for moment, (within_s, pieces) in moments(first_token_s).items():
                for door, leave in LEAVES.items():
                    taken = []
                    for _ in range(arguments.tries):
                        number += 1
                        pause_s = within_s * chance.uniform(0.1, 0.9)
                        left_at = leave(target, prompt_of(tokens, number), pause_s, pieces)
                        taken.append(1000 * poll.until_idle(left_at))
                    missed += _row(door, moment, size, taken)
            print(f"    (a first token of {size} tokens takes {1000 * first_token_s:.0f} ms)")
        periods = sorted(1000 * each for each in poll.periods)
        print(f"polled every {statistics.median(periods):.1f} ms, p90 {periods[int(0.9 * len(periods))]:.1f} ms")
    return 1 if missed else 0


def _row(door: str, moment: str, tokens: int, taken: list[float]) -> bool:
    taken = sorted(taken)
    p90 = taken[min(len(taken) - 1, int(0.9 * len(taken)))]
    line = (
        f"{door:<12}{moment:<24}{tokens:>8}{len(taken):>7}{statistics.median(taken):>8.1f}{p90:>8.1f}{taken[-1]:>8.1f}"
    )
    print(line + ("" if p90 < TARGET_P90_MS else f"  p90 over {TARGET_P90_MS:g}"), flush=True)
    return p90 >= TARGET_P90_MS


if __name__ == "__main__":
    sys.exit(main())
