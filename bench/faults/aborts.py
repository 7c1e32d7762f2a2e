"""The time from a client's disconnect until nothing of its request is held, by the counts of the engines themselves.

In each try a client reaches a stage of its request and disconnects there; `/metrics` is polled over kept connections.
The time ends at the first scrape without anything held, now and later. Nothing is subtracted for the polling, whose
period is printed, nor for other work of the machine. The column "in the stage" counts disconnects in their stage; other
tries count all the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Any

from attrs import frozen

from bench.faults.polling import GIVE_UP_S, Held, Poller
from bench.faults.scenario import Run, check
from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import node
from bench.rig.prompts import STORY_PROMPT, uncached_prompt
from bench.rig.result import percentile

COLUMNS = ("stage", "tries", "in the stage", "p50 ms", "p90 ms", "p99 ms", "max ms", "left behind")
TOKENS = 1000  # more than an answer gets before its client disconnects
TARGET_P90_MS = 60.0
PAUSE_S = 0.002  # between two polls, which would otherwise use a core of two


@dataclass
class Scene:
    """The server, its poller, and the random source of the stages."""

    port: int
    poll: Poller
    chance: Random = field(default_factory=lambda: Random(20))
    numbers: Iterator[int] = field(default_factory=count)

    def prompt(self, tokens: int) -> str:
        """Return a prompt of about so many tokens that is in no prefix cache."""
        return uncached_prompt(tokens, next(self.numbers))

    @contextmanager
    def request(self, body: Mapping[str, object]) -> Iterator[Chat]:
        """Send a request and read its answer in another thread; disconnect when the body ends."""
        chat = Chat(self.port, dict(body))
        reader = BackgroundReader(chat.read)
        try:
            yield chat
        finally:
            chat.leave()
            reader.wait(GIVE_UP_S)
            chat.close()

    def left_when(self, chat: Chat, *holds: Callable[[Held], bool], within_s: float = 0.0) -> tuple[float, bool]:
        """Disconnect once each of `holds` was true, up to `within_s` later, and before the answer's end.

        Returns the time until all is free, and whether it was so.
        """
        reached = all(self.poll.wait(each) for each in holds)
        time.sleep(self.chance.uniform(0.0, within_s))
        reached = reached and chat.outcome.ended_at == 0.0
        return self.poll.until_idle(leave(chat)), reached


Stage = Callable[[Any], tuple[float, bool]]
"""Takes a scene; returns the seconds until the request was released, and whether it was left in this stage."""


def leave(*clients: Chat | ResponsesSocket) -> float:
    """Disconnect clients; return when."""
    left_at = time.perf_counter()
    for client in clients:
        client.leave()
    return left_at


@frozen
class Limits:
    """The limits of the tries of a stage: a percentile of their times, and the share that reached the stage."""

    target_ms: float
    percent: int = 90
    reached_min: float = 0.0


def try_stages(
    run: Run,
    scene: Scene,
    stages: Mapping[str, Stage],
    limits: Limits,
    left: Callable[[], list[str]] = list,
    kind: str = "",
) -> None:
    """Try the chosen stages, and add a row for each; `left` returns what is left after the tries of one."""
    for name in run.chosen(stages):
        tries = [stages[name](scene) for _ in range(run.options.tries)]
        add(run, f"{kind}{name}", tries, left(), limits)
    run.notes.append(f"{kind}polled every {1000 * statistics.median(scene.poll.periods):.1f} ms")


def add(run: Run, name: str, tries: list[tuple[float, bool]], left: list[str], limits: Limits) -> None:
    """Add the row of a stage, and say what is wrong with it."""
    times_ms = sorted(1000 * took_s for took_s, _ in tries)
    reached = sum(in_stage for _, in_stage in tries)
    p50, p90, p99, p100 = (percentile(times_ms, each) for each in (50, 90, 99, 100))
    run.row(name, len(tries), reached, p50, p90, p99, p100, "; ".join(left) or "nothing")
    late = percentile(times_ms, limits.percent) >= limits.target_ms
    run.check(not late, f"{name}: p{limits.percent} over {limits.target_ms:g} ms")
    enough = reached >= limits.reached_min * len(tries)
    run.check(enough, f"{name}: only {reached} of {len(tries)} tries left in their stage")
    run.wrong += [f"{name}: left {each}" for each in left]


def first_token(port: int, tokens: int) -> tuple[float, int]:
    """Return the median time to the first token of such a prompt, in seconds, and its real number of tokens."""
    times_s, size = [], 0
    for number in range(5):
        start = time.perf_counter()
        body = chat_body(uncached_prompt(tokens, 90_000 + number), 2, stream_options={"include_usage": True})
        outcome = Chat(port, body).read()
        assert outcome.first_at is not None, f"a prompt of about {tokens} tokens: {outcome.status} {outcome.error}"
        times_s.append(outcome.first_at - start)
        size = (outcome.usage or {"prompt_tokens": tokens})["prompt_tokens"]
    return statistics.median(times_s), size


# One node with a real engine -------------------------------------------------------------


def moment(protocol: str, tokens: int, within_s: float, pieces: int, scene: Scene) -> tuple[float, bool]:
    """Disconnect within so many seconds of a piece of text, or of sending the request."""
    prompt, outcome = scene.prompt(tokens), Outcome()
    client: Chat | ResponsesSocket
    if protocol == "HTTP":
        client = Chat(scene.port, chat_body(prompt, TOKENS))
        outcome, events = client.outcome, client.events()
    else:
        client = ResponsesSocket(scene.port)
        client.send(response_body(prompt, TOKENS))
        events = client.events(outcome)
    while outcome.pieces < pieces and next(events, None) is not None:
        pass
    check(outcome.pieces >= pieces, f"the answer ended before its client left: {outcome.status} {outcome.error}")
    time.sleep(within_s * scene.chance.uniform(0.1, 0.9))
    # Without closing the socket, since the polling must begin at once.
    return scene.poll.until_idle(leave(client)), True


def abort_times(run: Run) -> None:
    """Measure two lengths of prompts, three moments, and both protocols."""
    with node(run.folder) as target:
        Chat(target.port, chat_body(STORY_PROMPT)).read()  # a first request is slower than any other
        poller = Poller({"node": target}, ("node",), PAUSE_S, engines_only=True, needs=("engine_running",))
        with closing(poller) as poll:
            scene, stages = Scene(target.port, poll, numbers=count(1)), dict[str, Stage]()
            for tokens in (8, 1500):
                first_s, size = first_token(target.port, tokens)
                run.notes.append(f"a first token of {size} tokens takes {1000 * first_s:.0f} ms")
                moments = {"at once": (0.0, 0), "before the first token": (first_s, 0), "at token 10": (0.0, 10)}
                for name, (within_s, pieces) in moments.items():
                    for protocol in ("HTTP", "WebSocket"):
                        stage = partial(moment, protocol, tokens, within_s, pieces)
                        stages[f"{name}, {size} tokens, {protocol}"] = stage
            try_stages(run, scene, stages, Limits(TARGET_P90_MS))
