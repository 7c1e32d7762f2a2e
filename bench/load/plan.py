"""The plan of a load, as pure data: the same seed gives the same requests for any number of processes.

Each request is drawn from the seed and its own number alone, so neither the order in which requests are sent nor the
process that sends them changes their contents. Worker `w` of `n` sends the requests whose number is `w` modulo `n`;
every worker draws all arrivals and keeps its own, so that all of them together are one Poisson process.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from random import Random

from attrs import frozen

# Short and common: about one token each, for the tokenizers of large models.
WORDS = (  # noqa: SIM905  # a word list reads best as text
    "the of and to in a is that for it was on with he be by at you are this not have had from but they she which or "
    "we an there her were one do been all their has would will what if can when so my more who out up said about "
    "other into than its time only could new them man some these then two first may any like now over such our even "
    "most me after also made well where must years much way down should because long before own good people world "
    "water house"
).split()
CANCEL_EARLY = 0.5  # of the early disconnects, those before the first token
EARLIEST = 0.001  # of the longest time until such a disconnect


@frozen
class Span:
    """A number of tokens: fixed where both ends are equal, else drawn evenly from `least` to `most`, both included."""

    least: int
    most: int

    def draw(self, chance: Random) -> int:
        """Return one number of the span."""
        return self.least if self.least == self.most else chance.randint(self.least, self.most)


@frozen
class Prompt:
    """One line of a prompts file; without `max_tokens` the answer's length is drawn like any other."""

    prompt: str
    max_tokens: int | None = None


@frozen(kw_only=True)
class Workload:
    """The distribution of requests."""

    seed: int = 0
    prompt_tokens: Span = Span(128, 128)
    output_tokens: Span = Span(128, 128)
    prompts: tuple[Prompt, ...] = ()  # taken in turn instead of random ones
    cancel_rate: float = 0.0  # of all requests, those whose client disconnects early
    cancel_within_s: float = 0.5  # of the disconnects before the first token


@frozen(kw_only=True)
class Pace:
    """When requests are sent: by `clients` that each wait for their answer, or at `rate` a second in any case."""

    clients: int | None = None
    think_s: float = 0.0  # a client's pause between an answer and its next request
    rate: float | None = None
    concurrency_max: int | None = None  # in an open loop, requests beyond it are delayed
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0  # requests sent and answered before the clock starts, and not counted


@frozen
class EarlyDisconnect:
    """When a request's client disconnects: after `tokens` tokens; if 0, after `after_s` or at the first token."""

    tokens: int
    after_s: float | None = None


@frozen
class PlannedRequest:
    """One planned request; `at_s` is when it is due after the start, None in a closed loop."""

    number: int
    prompt: str
    output_tokens: int
    at_s: float | None = None
    leave: EarlyDisconnect | None = None


def planned_request(workload: Workload, number: int, at_s: float | None = None) -> PlannedRequest:
    """Return the request of this number; negative numbers are the warm-up, without early disconnects."""
    chance = Random(f"{workload.seed}/{number}")  # seeded by text, since hashes differ between processes
    length, output = workload.prompt_tokens.draw(chance), workload.output_tokens.draw(chance)
    if workload.prompts:
        given = workload.prompts[number % len(workload.prompts)]
        prompt, output = given.prompt, output if given.max_tokens is None else given.max_tokens
    else:
        prompt = " ".join(chance.choices(WORDS, k=length))
    leave = _leave(workload, output, chance) if number >= 0 and chance.random() < workload.cancel_rate else None
    return PlannedRequest(number, prompt, output, at_s, leave)


def _leave(workload: Workload, output_tokens: int, chance: Random) -> EarlyDisconnect:
    if chance.random() < CANCEL_EARLY or output_tokens < 2:
        # Evenly over the orders of magnitude, since the time to a first token is unknown.
        return EarlyDisconnect(0, workload.cancel_within_s * EARLIEST ** chance.random())
    return EarlyDisconnect(chance.randint(1, output_tokens - 1))


def arrivals(seed: int, rate: float) -> Iterator[float]:
    """Yield the times of a Poisson process of `rate` a second, without end, in seconds after the start."""
    chance, at_s = Random(f"{seed}/arrivals"), 0.0
    while True:
        at_s += chance.expovariate(rate)
        yield at_s


def share(pace: Pace, seed: int, worker: int, workers: int) -> Iterator[tuple[int, float | None]]:
    """Yield number and time of each request that one of `workers` sends, in order.

    In a closed loop there are no times, and only `requests` ends it: the sender watches the clock.
    """
    if pace.rate is None:
        numbers = count(worker, workers) if pace.requests is None else range(worker, pace.requests, workers)
        yield from ((number, None) for number in numbers)
        return
    for number, at_s in islice(enumerate(arrivals(seed, pace.rate)), pace.requests):
        if pace.duration_s is not None and at_s >= pace.duration_s:
            return
        if number % workers == worker:
            yield number, at_s


def warmup_share(pace: Pace, worker: int, workers: int) -> Iterator[int]:
    """Yield the numbers of the warm-up requests that one of `workers` sends: -1, -2, and so on."""
    return iter(range(-1 - worker, -1 - pace.warmup, -workers))


def clients_per_worker(total: int, worker: int, workers: int) -> int:
    """Return how many of `total` clients, or permits, belong to one of `workers`."""
    return len(range(worker, total, workers))
