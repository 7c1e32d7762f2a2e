"""The time from a client's disconnect until its request is out of the engine, by the engine's own counts.

In each try a client closes its connection at a given moment, and `/metrics`, which reads the engine's counts anew for
each scrape, is polled over a kept connection. The time is that of the first scrape from which on the engine ran no
request, had none waiting and held no KV memory of running ones. An engine that has not yet received a request counts
nothing for it either, so polling continues until the node has ended the request and `SETTLE_S` have passed. Nothing is
subtracted for the polling; its period is printed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection

from bench.load.measure import summarise
from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import Node, metric, node, short_folder
from bench.rig.prompts import STORY_PROMPT, uncached_prompt

TARGET_P90_MS = 60.0
TOKENS = 1000  # more than an answer gets before its client disconnects
SETTLE_S = 0.15
PAUSE_S = 0.002  # between two polls, which would otherwise use a core of two
GIVE_UP_S = 10.0
COUNTS = ("espalier_engine_running", "espalier_engine_waiting", "espalier_engine_kv_tokens_used")


@dataclass
class Poll:
    """Reads the engine's counts as often as the node answers."""

    connection: HTTPConnection
    periods: list[float] = field(default_factory=list)

    def busy(self) -> tuple[bool, bool]:
        """Return whether the engine holds a request, and whether the node still runs one."""
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        self.connection.request("GET", "/metrics")
        text = self.connection.getresponse().read().decode()
        self.periods.append(time.perf_counter() - start + PAUSE_S)
        counts = [metric(text, name) for name in COUNTS]
        assert COUNTS[0] in text, "the scrape has no counts of the engine"
        return any(counts), metric(text, "espalier_requests_running") > 0

    def until_idle(self, since: float) -> float:
        """Return how long after `since` the engine became idle and stayed so, in seconds."""
        idle_at, quiet_since = None, None
        while True:
            engine, gateway = self.busy()
            now = time.perf_counter()
            idle_at = None if engine else idle_at or now
            quiet_since = None if engine or gateway else quiet_since or now
            if idle_at is not None and quiet_since is not None and now - quiet_since > SETTLE_S:
                return idle_at - since
            if now - since > GIVE_UP_S:
                raise RuntimeError(f"{GIVE_UP_S} s after its client had left, a request was still there")


# One try ---------------------------------------------------------------------------------


def leave_chat(target: Node, prompt: str, pause_s: float, pieces: int) -> float:
    """Send a request over HTTP and disconnect; return when."""
    chat = Chat(target.port, chat_body(prompt, TOKENS))
    return _leave(chat.leave, chat.outcome, chat.events(), pause_s, pieces)


def leave_socket(target: Node, prompt: str, pause_s: float, pieces: int) -> float:
    """Send a request over a WebSocket and disconnect; return when."""
    socket, outcome = ResponsesSocket(target.port), Outcome()
    socket.send(response_body(prompt, TOKENS))
    # Without closing the socket, since the polling must begin at once.
    return _leave(socket.leave, outcome, socket.events(outcome), pause_s, pieces)


def _leave(leave: Callable[[], None], outcome: Outcome, events: Iterator[object], pause_s: float, pieces: int) -> float:
    """Disconnect a pause after so many pieces of text have come; return when."""
    while outcome.pieces < pieces and next(events, None) is not None:
        pass
    if outcome.pieces < pieces:
        raise RuntimeError(f"the answer ended before its client left: {outcome.status} {outcome.error}")
    time.sleep(pause_s)
    left_at = time.perf_counter()
    leave()
    return left_at


# The table ------------------------------------------------------------------------------

LEAVES: dict[str, Callable[[Node, str, float, int], float]] = {"HTTP": leave_chat, "WebSocket": leave_socket}


def moments(first_token_s: float) -> dict[str, tuple[float, int]]:
    """Return the moments to disconnect at: within how many seconds, after which piece of text."""
    return {
        "before registration": (0.0, 0),
        "before the first token": (first_token_s, 0),
        "at token 10": (0.0, 10),
    }


def first_token(target: Node, tokens: int) -> tuple[float, int]:
    """Return the median time to the first token of such a prompt, in seconds, and its real number of tokens."""
    times_s, size = [], 0
    for number in range(5):
        start = time.perf_counter()
        body = chat_body(uncached_prompt(tokens, 90_000 + number), 2, stream_options={"include_usage": True})
        outcome = Chat(target.port, body).read()
        assert outcome.first_at is not None
        assert outcome.usage is not None
        times_s.append(outcome.first_at - start)
        size = outcome.usage["prompt_tokens"]
    return statistics.median(times_s), size


def main() -> int:
    """Print the table; return 1 if a p90 misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=50)
    arguments = parser.parse_args()
    missed = 0
    with short_folder() as folder, node(folder) as target:
        Chat(target.port, chat_body(STORY_PROMPT)).read()  # a first request is slower than any other
        poll = Poll(HTTPConnection("127.0.0.1", target.port, timeout=GIVE_UP_S))
        print("from the client's close to an idle engine, in ms")
        print(f"{'protocol':<12}{'moment':<24}{'prompt':>8}{'tries':>7}{'p50':>8}{'p90':>8}{'max':>8}")
        number, chance = 0, random.Random(20)
        for tokens in (8, 1500):
            first_token_s, size = first_token(target, tokens)
            for moment, (within_s, pieces) in moments(first_token_s).items():
                for protocol, leave in LEAVES.items():
                    times_ms = []
                    for _ in range(arguments.tries):
                        number += 1
                        pause_s = within_s * chance.uniform(0.1, 0.9)
                        left_at = leave(target, uncached_prompt(tokens, number), pause_s, pieces)
                        times_ms.append(1000 * poll.until_idle(left_at))
                    missed += _row(protocol, moment, size, times_ms)
            print(f"    (a first token of {size} tokens takes {1000 * first_token_s:.0f} ms)")
        periods = summarise(poll.periods, 1000)
        print(f"polled every {periods.p50:.1f} ms, p90 {periods.p90:.1f} ms")
    return 1 if missed else 0


def _row(protocol: str, moment: str, tokens: int, times_ms: list[float]) -> bool:
    """Print one row; return whether its p90 missed the target."""
    times = summarise(times_ms)
    assert times.p90 is not None
    missed = times.p90 >= TARGET_P90_MS
    figures = f"{times.count:>7}{times.p50:>8.1f}{times.p90:>8.1f}{times.most:>8.1f}"
    verdict = f"  p90 over {TARGET_P90_MS:g}" if missed else ""
    print(f"{protocol:<12}{moment:<24}{tokens:>8}{figures}{verdict}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
