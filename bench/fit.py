"""The costs of a server's engine steps, measured by streams, as the `costs` of a simulated engine.

    python -m bench.fit --url http://127.0.0.1:8000 --model tiny

The server needs OpenAI's streaming chat completions, and should be idle otherwise. Two times are measured: to the
first token of a prompt alone, for several lengths; and from one token to the next, for several numbers of streams at
once and several lengths. The costs are the non-negative ones with the least squared relative error. The overhead of a
first token beside the engine's step (network, tokeniser, template) is fitted and printed separately. Keep the lengths
below the engine's prefill chunk: a prompt of several chunks takes several steps. With many streams the client's own
speed is part of the measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from bench.step_costs import Timing, Unusable, first_token, fit, next_token, table

TIMEOUT_S = 300.0
PROBE_WORDS = 100
PIECES_MIN = 0.8  # of the tokens: fewer pieces of text do not show when each token came
OVERLAP_MIN = 0.5  # of the requested tokens, those that came while all streams ran
LENGTH_FACTORS = (1, 2, 4, 8)  # of answers that were too short to overlap
WORDS = ("oak", "apple", "river", "fox", "bread", "rain", "night", "story", "green", "quiet", "old", "stone", "garden")


@dataclass
class StreamTimes:
    """One stream: the times of its pieces, and the server's usage."""

    sent_at: float
    pieces: list[float] = field(default_factory=list)  # when each came
    ended_at: float = 0.0  # when its finish reason came
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def tokens_between(self, begin: float, end: float) -> float:
        """Return the number of tokens that came after `begin` and up to `end`.

        If many tokens had no text of their own, all are assumed to have come evenly.
        """
        if len(self.pieces) >= PIECES_MIN * self.completion_tokens:
            return sum(begin < at <= end for at in self.pieces) * self.completion_tokens / len(self.pieces)
        first = self.pieces[0]
        return (self.completion_tokens - 1) * (end - begin) / max(self.ended_at - first, end - begin)


@dataclass(frozen=True)
class Server:
    """The server to measure."""

    url: str
    model: str
    key: str | None = None
    ignore_eos: bool = True

    def send(self, prompt: str, tokens_max: int) -> StreamTimes:
        """Send one request and read its answer to the end; raises `Unusable`."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT_S)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens_max,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"ignore_eos": True} if self.ignore_eos else {}
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        times = StreamTimes(time.perf_counter())
        try:
            connection.request("POST", path, json.dumps(body), headers)
            for event in _events(connection):
                _note(times, event)
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unusable(f"{self.url}: {error!r}") from error
        finally:
            connection.close()
        if not (times.pieces and times.ended_at and times.prompt_tokens and times.completion_tokens):
            raise Unusable(f"{self.url}: a stream without text, or without a finish reason or usage at its end")
        return times


def _events(connection: HTTPConnection) -> Iterator[dict[str, Any]]:
    answer = connection.getresponse()
    if answer.status != 200:
        raise Unusable(f"the server answered {answer.status}: {answer.read(2000).decode(errors='replace')}")
    while line := answer.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
        elif line.startswith(b"data: [DONE]"):
            return
    raise Unusable("a stream ended without [DONE]")


def _note(times: StreamTimes, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        raise Unusable(f"the server failed: {error}")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            times.pieces.append(time.perf_counter())
        if choice.get("finish_reason"):
            times.ended_at = time.perf_counter()
    if usage := event.get("usage"):
        times.prompt_tokens = usage["prompt_tokens"]
        times.completion_tokens = usage["completion_tokens"]
        times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass
class Bench:
    """Measures one server, with random prompts that no prefix cache has."""

    server: Server
    rng: random.Random
    repeats: int
    words_a_token: float = 1.0
    extra_tokens: int = 0  # of the chat template

    def calibrate(self) -> None:
        """Warm the server up, and measure the words a token of its tokenizer."""
        short, long = (self.server.send(self._words(count), 2) for count in (PROBE_WORDS, 2 * PROBE_WORDS))
        if long.prompt_tokens <= short.prompt_tokens:
            raise Unusable("a longer prompt has no more tokens")
        self.words_a_token = PROBE_WORDS / (long.prompt_tokens - short.prompt_tokens)
        self.extra_tokens = max(2 * short.prompt_tokens - long.prompt_tokens, 0)

    def first(self, length: int) -> Timing:
        """Time the first token of a prompt alone."""
        streams = [self.server.send(self._prompt(length), 2) for _ in range(self.repeats)]
        tokens = statistics.median(stream.prompt_tokens - stream.cached_tokens for stream in streams)
        return first_token(statistics.median(stream.pieces[0] - stream.sent_at for stream in streams), round(tokens))

    def next(self, streams: int, length: int, tokens: int) -> Timing:
        """Time the steps of so many streams, while all of them run."""
        timings = [self._together(streams, length, tokens) for _ in range(self.repeats)]
        return sorted(timings, key=lambda timing: timing.seconds)[len(timings) // 2]

    def _together(self, streams: int, length: int, tokens: int) -> Timing:
        """Time streams that run together, with longer answers if the first ended before the last began."""
        for factor in LENGTH_FACTORS:
            prompts = [self._prompt(length) for _ in range(streams)]
            with ThreadPoolExecutor(streams) as pool:
                answers = list(pool.map(partial(self.server.send, tokens_max=tokens * factor), prompts))
            begin, end = max(answer.pieces[0] for answer in answers), min(answer.ended_at for answer in answers)
            if end <= begin:
                continue
            count = sum(answer.tokens_between(begin, end) for answer in answers)
            if count >= OVERLAP_MIN * tokens * streams:
                context = statistics.mean(answer.prompt_tokens + answer.completion_tokens / 2 for answer in answers)
                return next_token((end - begin) * streams / count, streams, context)
        raise Unusable(f"{streams} streams hardly ran at once: take more --tokens, or fewer --streams")

    def _prompt(self, length: int) -> str:
        return self._words(max(1, round((length - self.extra_tokens) * self.words_a_token)))

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))


def measure(bench: Bench, lengths: Sequence[int], streams: Sequence[int], tokens: int) -> Iterator[Timing]:
    """Yield all timings: each length alone, then each number of streams at the shortest and the longest length."""
    bench.calibrate()
    for length in lengths:
        yield bench.first(length)
    for count in streams:
        for length in sorted({min(lengths), max(lengths)}):
            yield bench.next(count, length, tokens)


def _numbers(text: str) -> list[int]:
    numbers = [int(each) for each in text.split(",")]
    if min(numbers) < 1:
        raise ValueError("above 0")
    return numbers


def main() -> None:
    """Measure a server and print the costs; exits with a sentence if its answers cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="simulated", help="of the engine, in the table that is printed")
    parser.add_argument("--key", help="of a server that needs one")
    parser.add_argument("--lengths", type=_numbers, default=[64, 256, 512, 1024], help="of prompts, in tokens")
    parser.add_argument("--streams", type=_numbers, default=[1, 2, 4, 8, 16], help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median counts")
    parser.add_argument("--plain", action="store_true", help="do not send ignore_eos, which some servers refuse")
    arguments = parser.parse_args()
    server = Server(arguments.url, arguments.model, arguments.key, ignore_eos=not arguments.plain)
    bench = Bench(server, random.Random(), max(1, arguments.repeats))
    timings = []
    try:
        for timing in measure(bench, arguments.lengths, arguments.streams, arguments.tokens):
            print(f"{1000 * timing.seconds:9.2f} ms  {timing.description}", file=sys.stderr, flush=True)
            timings.append(timing)
        print(table(arguments.name, fit(timings)))
    except Unusable as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
