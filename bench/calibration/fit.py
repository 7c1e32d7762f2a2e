"""The costs of a server's engine steps, measured by streams, as the `costs` of a simulated engine.

    python -m bench.calibration.fit --url http://127.0.0.1:8000 --model tiny

The server needs OpenAI's streaming chat completions, and should be idle otherwise. Two times are measured: to the
first token of a prompt alone, for several lengths; and from one token to the next, for several numbers of streams at
once and several lengths. The costs are the non-negative ones with the least squared relative error. The overhead of a
first token beside the engine's step (network, tokeniser, template) is fitted and printed separately. Keep the lengths
below the engine's prefill chunk: a prompt of several chunks takes several steps. With many streams the client's own
speed is part of the measurement.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import sqrt

import numpy as np
from attrs import define, frozen

from bench.load.measure import stamps, ttft_s
from bench.load.messages import Job, Record, Target
from bench.load.plan import Pace, Workload
from bench.load.process import Failed, run_to_end

COSTS = ("fixed_s", "per_running_s", "per_prefill_token_s", "per_kv_token_s", "overhead_s")
DEPENDENT = 1e-9  # of the greatest singular value: with a smaller one the columns depend on each other
PROBE_WORDS = 100
PIECES_MIN = 0.8  # of the tokens: fewer pieces of text do not show when each token came
OVERLAP_MIN = 0.5  # of the requested tokens, those that came while all streams ran
LENGTH_FACTORS = (1, 2, 4, 8)  # of answers that were too short to overlap


class Unusable(Exception):
    """The reason why a server's answers cannot be used."""


@frozen
class Timing:
    """One timed token, and how often each cost is in it."""

    description: str
    seconds: float
    amounts: tuple[float, ...]  # in the order of `COSTS`


@frozen
class Fit:
    """The costs with the least error, and that error as a share of the measured times."""

    costs: dict[str, float]
    rms: float  # root mean square of the relative errors
    worst: tuple[float, Timing]


def first_token(seconds: float, prompt_tokens: int) -> Timing:
    """Return the timing of the first token of a request that ran alone."""
    return Timing(f"first token after a prompt of {prompt_tokens}", seconds, (1, 1, prompt_tokens, 0, 1))


def next_token(seconds: float, streams: int, context_tokens: float) -> Timing:
    """Return the timing of a step that gave each stream a token; `context_tokens` is the mean length of one."""
    description = f"next token of {streams} streams of {context_tokens:.0f}"
    return Timing(description, seconds, (1, streams, 0, streams * context_tokens, 0))


def fit(timings: Sequence[Timing]) -> Fit:
    """Return the non-negative costs with the least squared relative error; raises `Unusable` without timings.

    With five costs there are few choices of those above zero: each is tried.
    """
    if not timings:
        raise Unusable("nothing was measured")
    best: tuple[float, dict[str, float]] | None = None
    for size in range(1, len(COSTS) + 1):
        for columns in combinations(range(len(COSTS)), size):
            solution = _solve([[timing.amounts[column] / timing.seconds for column in columns] for timing in timings])
            if solution is None or min(solution) < 0:
                continue
            costs = dict.fromkeys(COSTS, 0.0) | dict(zip((COSTS[column] for column in columns), solution, strict=True))
            error = sum(_error(timing, costs) ** 2 for timing in timings)
            if best is None or error < best[0] * (1 - 1e-6):
                best = error, costs
    assert best is not None, "a fit of one cost always has a solution"
    error, costs = best
    worst = max(((abs(_error(timing, costs)), timing) for timing in timings), key=lambda pair: pair[0])
    return Fit(costs, sqrt(error / len(timings)), worst)


def _error(timing: Timing, costs: dict[str, float]) -> float:
    """Return the relative error of the time that follows from the costs."""
    return sum(amount * costs[name] for name, amount in zip(COSTS, timing.amounts, strict=True)) / timing.seconds - 1


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Return x with the least squared distance of `rows` times x from one; None where the columns depend."""
    matrix = np.array(rows)
    lengths = np.linalg.norm(matrix, axis=0)
    if not lengths.all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / lengths, np.ones(len(rows)), rcond=DEPENDENT)
    return [float(x) for x in solution / lengths] if rank == len(lengths) else None


def table(fitted: Fit) -> str:
    """Return the table of `cluster.toml`, with the residual as a comment."""
    lines = ["[engine.NAME.simulated.costs]"]
    lines += [f"{cost} = {fitted.costs[cost]:.4g}" for cost in COSTS if cost != "overhead_s"]
    share, timing = fitted.worst
    lines.append(
        f"# residual: {100 * fitted.rms:.1f} % (root mean square), at worst {100 * share:.1f} % ({timing.description})"
    )
    lines.append(f"# a first token took {1000 * fitted.costs['overhead_s']:.2f} ms beside its step")
    if not fitted.costs["fixed_s"]:
        lines.append("# fixed_s must be above 0: measure again, with less going on or more repeats")
    return "\n".join(lines)


@define
class Bench:
    """Measures one server, with random prompts that no prefix cache has."""

    target: Target
    seed: int
    repeats: int
    words_a_token: float = 1.0
    extra_tokens: int = 0  # of the chat template

    def calibrate(self) -> None:
        """Warm the server up, and measure the words a token of its tokenizer."""
        short, long = (prompt_tokens(self._send(count, 2)[0]) for count in (PROBE_WORDS, 2 * PROBE_WORDS))
        if long <= short:
            raise Unusable("a longer prompt has no more tokens")
        self.words_a_token = PROBE_WORDS / (long - short)
        self.extra_tokens = max(2 * short - long, 0)

    def first(self, length: int) -> Timing:
        """Time the first token of a prompt alone."""
        records = self._send(self._words(length), 2, requests=self.repeats)
        tokens = statistics.median(prompt_tokens(record) - (record.cached_tokens or 0) for record in records)
        return first_token(statistics.median(ttft_s(record) or 0.0 for record in records), round(tokens))

    def next(self, streams: int, length: int, tokens: int) -> Timing:
        """Time the steps of so many streams, while all of them run."""
        timings = [self._together(streams, length, tokens) for _ in range(self.repeats)]
        return sorted(timings, key=lambda timing: timing.seconds)[len(timings) // 2]

    def _together(self, streams: int, length: int, tokens: int) -> Timing:
        """Time streams that run together, with longer answers if the first ended before the last began."""
        for factor in LENGTH_FACTORS:
            records = self._send(self._words(length), tokens * factor, requests=streams, clients=streams)
            begin = max(record.sent_s + stamps(record)[0] for record in records)
            end = min(record.sent_s + stamps(record)[-1] for record in records)
            if end <= begin:
                continue
            count = sum(tokens_between(record, begin, end) for record in records)
            if count >= OVERLAP_MIN * tokens * streams:
                context = statistics.mean(prompt_tokens(each) + (each.output_tokens or 0) / 2 for each in records)
                return next_token((end - begin) * streams / count, streams, context)
        raise Unusable(f"{streams} streams hardly ran at once: take more --tokens, or fewer --streams")

    def _words(self, length: int) -> int:
        return max(1, round((length - self.extra_tokens) * self.words_a_token))

    def _send(self, words: int, tokens_max: int, requests: int = 1, clients: int = 1) -> list[Record]:
        """Send requests with prompts of so many words; raises `Unusable`."""
        self.seed += 1
        workload = Workload(seed=self.seed, prompt_tokens=words, output_tokens=tokens_max)
        job = Job(target=self.target, workload=workload, pace=Pace(clients=clients, requests=requests))
        try:
            records = run_to_end([job]).records
        except Failed as error:
            raise Unusable(f"{self.target.url}: {error}") from error
        if not all(record.stamps and record.prompt_tokens and record.output_tokens for record in records):
            raise Unusable(f"{self.target.url}: a stream without text, or without a usage at its end")
        return records


def prompt_tokens(record: Record) -> int:
    """Return the number of prompt tokens of an answer."""
    return record.prompt_tokens or 0


def tokens_between(record: Record, begin_s: float, end_s: float) -> float:
    """Return the number of tokens that came after `begin_s` and up to `end_s`.

    If many tokens had no text of their own, all are assumed to have come evenly.
    """
    pieces, tokens = [record.sent_s + at_s for at_s in stamps(record)], record.output_tokens or 0
    if len(pieces) >= PIECES_MIN * tokens:
        return sum(begin_s < at_s <= end_s for at_s in pieces) * tokens / len(pieces)
    return (tokens - 1) * (end_s - begin_s) / max(record.sent_s + record.ended_s - pieces[0], end_s - begin_s)


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
    parser = argparse.ArgumentParser(prog="python -m bench.calibration.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=_numbers, default=[64, 256, 512, 1024], help="of prompts, in tokens")
    parser.add_argument("--streams", type=_numbers, default=[1, 2, 4, 8, 16], help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median counts")
    arguments = parser.parse_args()
    target = Target(url=arguments.url, api="chat", model=arguments.model, ignore_eos=True)
    bench = Bench(target, random.randrange(2**32), max(1, arguments.repeats))
    timings = []
    try:
        for timing in measure(bench, arguments.lengths, arguments.streams, arguments.tokens):
            print(f"{1000 * timing.seconds:9.2f} ms  {timing.description}", file=sys.stderr, flush=True)
            timings.append(timing)
        print(table(fit(timings)))
    except Unusable as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
