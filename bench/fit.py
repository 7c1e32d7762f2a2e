"""The costs of a server's engine steps, measured by streams, as the `costs` of a simulated engine.

    python -m bench.fit --url http://127.0.0.1:8000 --model tiny

Any server with OpenAI's streaming chat completions will do; it should have nothing else to do meanwhile. Two things are
timed: how long a prompt takes to its first token, alone, for several lengths; and how long a token takes to the next,
for several numbers of streams at once and several lengths. The costs are the non-negative ones with the least squared
relative error. What a first token takes beside the engine's step (network, tokeniser, template) is fitted too and told
apart, so that it is not taken for a price of steps. Keep the lengths below the engine's prefill chunk: a prompt of
several chunks takes several steps. At many streams the client's own pace is part of what is measured.
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
from itertools import combinations
from math import sqrt
from typing import Any
from urllib.parse import urlsplit

PRICES = ("fixed_s", "per_running_s", "per_prefill_token_s", "per_kv_token_s", "overhead_s")
SINGULAR = 1e-9  # of a column's length: below this, what it says has been said by the others
TIMEOUT_S = 300.0
PROBE_WORDS = 100
PIECES_MIN = 0.8  # of the tokens: with fewer pieces of text they say nothing about when each token came
OVERLAP_MIN = 0.5  # of the tokens asked for, those that came while all streams answered
LONGER = (1, 2, 4, 8)
WORDS = ("oak", "apple", "river", "fox", "bread", "rain", "night", "story", "green", "quiet", "old", "stone", "garden")


class Unusable(Exception):
    """The server's answers cannot be used, and why."""


# Fitting: pure ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One thing that was timed, and how much of each price is in it."""

    what: str
    seconds: float
    amounts: tuple[float, ...]  # as `PRICES`


@dataclass(frozen=True)
class Fit:
    """The prices with the least error, and that error as a share of what was measured."""

    prices: dict[str, float]
    rms: float
    worst: tuple[float, Row]


def first_token(seconds: float, prompt_tokens: int) -> Row:
    """Return the row of a request that was alone when its prompt was computed."""
    return Row(f"first token after a prompt of {prompt_tokens}", seconds, (1, 1, prompt_tokens, 0, 1))


def next_token(seconds: float, streams: int, context_tokens: float) -> Row:
    """Return the row of a step that gave each of some streams a token, `context_tokens` being one's mean length."""
    what = f"next token of {streams} streams of {context_tokens:.0f}"
    return Row(what, seconds, (1, streams, 0, streams * context_tokens, 0))


def fit(rows: Sequence[Row]) -> Fit:
    """Return the non-negative prices with the least squared relative error; raises `Unusable` without any.

    With five prices every choice of those above zero can be tried, which finds the best one without any cleverness.
    """
    if not rows:
        raise Unusable("nothing was measured")
    best: tuple[float, dict[str, float]] | None = None
    for size in range(1, len(PRICES) + 1):
        for columns in combinations(range(len(PRICES)), size):
            solution = _solved([[row.amounts[column] / row.seconds for column in columns] for row in rows])
            if solution is None or min(solution) < 0:
                continue
            prices = dict.fromkeys(PRICES, 0.0) | dict(zip((PRICES[each] for each in columns), solution, strict=True))
            error = sum(_error(row, prices) ** 2 for row in rows)
            if best is None or error < best[0] * (1 - 1e-6):
                best = error, prices
    assert best is not None, "one price alone always has a solution"
    error, prices = best
    worst = max(((abs(_error(row, prices)), row) for row in rows), key=lambda pair: pair[0])
    return Fit(prices, sqrt(error / len(rows)), worst)


def _error(row: Row, prices: dict[str, float]) -> float:
    """Return by what share of the measured time the prices miss it."""
    return sum(amount * prices[name] for name, amount in zip(PRICES, row.amounts, strict=True)) / row.seconds - 1


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Return x with the least squared distance of `rows` times x from one; None where the columns depend.

    By Gram and Schmidt, twice over for accuracy, as normal equations would square the condition number.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    basis: list[list[float]] = []
    upper: list[list[float]] = []
    for column in columns:
        rest, parts = column, [0.0] * len(basis)
        for _ in range(2):
            for place, each in enumerate(basis):
                part = _dot(each, rest)
                parts[place] += part
                rest = [value - part * unit for value, unit in zip(rest, each, strict=True)]
        length = sqrt(_dot(rest, rest))
        if length <= SINGULAR * sqrt(_dot(column, column)):
            return None
        upper.append([*parts, length])
        basis.append([value / length for value in rest])
    wanted = [sum(each) for each in basis]
    solution = [0.0] * len(columns)
    for place in reversed(range(len(columns))):
        known = sum(upper[later][place] * solution[later] for later in range(place + 1, len(columns)))
        solution[place] = (wanted[place] - known) / upper[place][place]
    return solution


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(one, other, strict=True))


def table(name: str, fitted: Fit) -> str:
    """Return the section of `cluster.toml`, with what is left over as a comment."""
    lines = [f"[engine.{name}.simulated.costs]"]
    lines += [f"{price} = {fitted.prices[price]:.4g}" for price in PRICES if price != "overhead_s"]
    share, row = fitted.worst
    lines.append(f"# residual: {100 * fitted.rms:.1f} % (root mean square), at worst {100 * share:.1f} % ({row.what})")
    lines.append(f"# a first token took {1000 * fitted.prices['overhead_s']:.2f} ms beside its step")
    if not fitted.prices["fixed_s"]:
        lines.append("# fixed_s must be above 0: measure again, with less going on or more repeats")
    return "\n".join(lines)


# Measuring --------------------------------------------------------------------------------


@dataclass
class Heard:
    """One stream: the times of its pieces, and the server's usage."""

    asked_at: float
    times: list[float] = field(default_factory=list)
    ended_at: float = 0.0  # its finish reason came
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def tokens_between(self, begin: float, end: float) -> float:
        """Return how many tokens came after `begin` and up to `end`.

        Where many tokens had no text of their own, all are taken to have come evenly.
        """
        if len(self.times) >= PIECES_MIN * self.completion_tokens:
            return sum(begin < at <= end for at in self.times) * self.completion_tokens / len(self.times)
        first = self.times[0]
        return (self.completion_tokens - 1) * (end - begin) / max(self.ended_at - first, end - begin)


@dataclass(frozen=True)
class Server:
    """Where to ask, and how."""

    url: str
    model: str
    key: str | None = None
    ignore_eos: bool = True

    def ask(self, prompt: str, tokens_max: int) -> Heard:
        """Ask for one answer and hear it to its end; raises `Unusable`."""
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
        heard = Heard(time.perf_counter())
        try:
            connection.request("POST", path, json.dumps(body), headers)
            for event in _events(connection):
                _note(heard, event)
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unusable(f"{self.url}: {error!r}") from error
        finally:
            connection.close()
        if not (heard.times and heard.ended_at and heard.prompt_tokens and heard.completion_tokens):
            raise Unusable(f"{self.url}: a stream without text, or without a finish reason or usage at its end")
        return heard


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


def _note(heard: Heard, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        raise Unusable(f"the server failed: {error}")
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
            heard.times.append(time.perf_counter())
        if choice.get("finish_reason"):
            heard.ended_at = time.perf_counter()
    if usage := event.get("usage"):
        heard.prompt_tokens = usage["prompt_tokens"]
        heard.completion_tokens = usage["completion_tokens"]
        heard.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass
class Bench:
    """Asks one server, with prompts that no cache knows."""

    server: Server
    rng: random.Random
    repeats: int
    words_a_token: float = 1.0
    extra_tokens: int = 0  # that the template adds

    def calibrate(self) -> None:
        """Warm the server up, and learn how many words make a token."""
        short, long = (self.server.ask(self._words(count), 2) for count in (PROBE_WORDS, 2 * PROBE_WORDS))
        if long.prompt_tokens <= short.prompt_tokens:
            raise Unusable("a longer prompt has no more tokens")
        self.words_a_token = PROBE_WORDS / (long.prompt_tokens - short.prompt_tokens)
        self.extra_tokens = max(2 * short.prompt_tokens - long.prompt_tokens, 0)

    def first(self, length: int) -> Row:
        """Time a prompt alone."""
        heard = [self.server.ask(self._prompt(length), 2) for _ in range(self.repeats)]
        tokens = statistics.median(each.prompt_tokens - each.cached_tokens for each in heard)
        return first_token(statistics.median(each.times[0] - each.asked_at for each in heard), round(tokens))

    def next(self, streams: int, length: int, tokens: int) -> Row:
        """Time the steps of so many streams, while all of them answer."""
        rows = [self._together(streams, length, tokens) for _ in range(self.repeats)]
        return sorted(rows, key=lambda row: row.seconds)[len(rows) // 2]

    def _together(self, streams: int, length: int, tokens: int) -> Row:
        """Time one lot of streams, with longer answers if these were over before all had begun."""
        for more in LONGER:
            prompts = [self._prompt(length) for _ in range(streams)]
            with ThreadPoolExecutor(streams) as pool:
                heard = list(pool.map(partial(self.server.ask, tokens_max=tokens * more), prompts))
            begin, end = max(each.times[0] for each in heard), min(each.ended_at for each in heard)
            if end <= begin:
                continue
            count = sum(each.tokens_between(begin, end) for each in heard)
            if count >= OVERLAP_MIN * tokens * streams:
                context = statistics.mean(each.prompt_tokens + each.completion_tokens / 2 for each in heard)
                return next_token((end - begin) * streams / count, streams, context)
        raise Unusable(f"{streams} streams hardly ran at once: ask for more --tokens, or for fewer --streams")

    def _prompt(self, length: int) -> str:
        return self._words(max(1, round((length - self.extra_tokens) * self.words_a_token)))

    def _words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))


def measure(bench: Bench, lengths: Sequence[int], streams: Sequence[int], tokens: int) -> Iterator[Row]:
    """Yield all that is timed: each length alone, then each number of streams at the shortest and the longest."""
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
    """Read the command line, measure and print the costs; exits with a sentence if nothing can be made of a server."""
    parser = argparse.ArgumentParser(prog="python -m bench.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="simulated", help="of the engine, in the table that is printed")
    parser.add_argument("--key", help="for servers that want one")
    parser.add_argument("--lengths", type=_numbers, default=[64, 256, 512, 1024], help="of prompts, in tokens")
    parser.add_argument("--streams", type=_numbers, default=[1, 2, 4, 8, 16], help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median counts")
    parser.add_argument("--plain", action="store_true", help="ask without ignore_eos, which not all servers know")
    asked = parser.parse_args()
    server = Server(asked.url, asked.model, asked.key, ignore_eos=not asked.plain)
    bench = Bench(server, random.Random(), max(1, asked.repeats))
    rows = []
    try:
        for row in measure(bench, asked.lengths, asked.streams, asked.tokens):
            print(f"{1000 * row.seconds:9.2f} ms  {row.what}", file=sys.stderr, flush=True)
            rows.append(row)
        print(table(asked.name, fit(rows)))
    except Unusable as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
