"""The plan of a load, as pure data: the same seed gives the same requests for any number of processes.

Each request is drawn from the seed and its own number alone, so neither the order in which requests are sent nor the
process that sends them changes their contents. Worker `w` of `n` sends the requests whose number is `w` modulo `n`;
every worker draws all arrivals and keeps its own, so that all of them together are one process of arrivals.

With several turns a number is that of a conversation, whose requests follow each other; else each has a single one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
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
BYTE_WORDS = tuple(WORDS[byte % len(WORDS)] for byte in range(256))  # ten times as fast as `choices`
BLOCKS_KEPT_MAX = 4096  # of some 4 kB
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


@frozen
class TracedRequest:
    """One line of a trace: when it came, its lengths in tokens, and the blocks that its prompt consists of.

    Prompts that begin with the same blocks have the same beginning; the last block may be used in part.
    """

    at_s: float  # after the first of the trace
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@frozen(kw_only=True)
class Workload:
    """The distribution of requests."""

    seed: int = 0
    prompt_tokens: Span = Span(128, 128)
    output_tokens: Span = Span(128, 128)
    prompts: tuple[Prompt, ...] = ()  # taken in turn instead of random ones
    trace: tuple[TracedRequest, ...] = ()  # taken in turn, with their lengths
    block_tokens: int = 512  # of a trace
    prefixes: int = 0  # different beginnings, one of which each conversation shares with others
    prefix_tokens: Span = Span(0, 0)  # drawn once for each of them
    turns: Span = Span(1, 1)  # of a conversation
    cancel_rate: float = 0.0  # of all requests, those whose client disconnects early
    cancel_within_s: float = 0.5  # of the disconnects before the first token


@frozen(kw_only=True)
class Pace:
    """When requests are sent: by `clients` that each wait for their answer; else at `rate`, or as in a trace."""

    clients: int | None = None
    think_s: float = 0.0  # a client's pause between an answer and its next request
    rate: float | None = None  # a second
    burstiness: float = 1.0  # shape of the gamma distribution of gaps: 1 Poisson, below it bursty, above it even
    traced: bool = False
    trace_speed: float = 1.0  # a factor: twice as fast as it was recorded is 2
    concurrency_max: int | None = None  # in an open loop, requests beyond it are delayed
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0  # requests sent and answered before the clock starts, and not counted
    warm_connections: bool = False  # in a closed loop, the clients keep the connections of the warm-up

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent at their times, however long answers take."""
        return self.rate is not None or self.traced


@frozen
class EarlyDisconnect:
    """When a request's client disconnects: after `tokens` tokens; if 0, after `after_s` or at the first token."""

    tokens: int
    after_s: float | None = None


@frozen
class PlannedRequest:
    """One planned request; `at_s` is when it is due after the start, None in a closed loop and for later turns."""

    number: int
    prompt: str
    output_tokens: int
    at_s: float | None = None
    leave: EarlyDisconnect | None = None
    turn: int = 0


def planned_request(workload: Workload, number: int, at_s: float | None = None) -> PlannedRequest:
    """Return the request of this number; negative numbers are the warm-up, without early disconnects."""
    chance = Random(f"{workload.seed}/{number}")  # seeded by text, since hashes differ between processes
    length, output = workload.prompt_tokens.draw(chance), workload.output_tokens.draw(chance)
    if workload.prompts:
        given = workload.prompts[number % len(workload.prompts)]
        prompt, output = given.prompt, output if given.max_tokens is None else given.max_tokens
    elif workload.trace:
        traced = workload.trace[number % len(workload.trace)]
        prompt, output = traced_prompt(workload, traced, number), max(1, traced.output_tokens)
    else:
        prompt = " ".join(chance.choices(WORDS, k=length))
    if workload.prefixes:
        prompt = f"{prefix(workload, Random(f'{workload.seed}/{number}/prefix').randrange(workload.prefixes))} {prompt}"
    leave = _leave(workload, output, chance) if number >= 0 and chance.random() < workload.cancel_rate else None
    return PlannedRequest(number, prompt, output, at_s, leave)


def turns(workload: Workload, number: int) -> int:
    """Return the number of turns of a conversation."""
    if workload.turns.least == workload.turns.most:
        return workload.turns.most  # without seeding a generator, which takes longer than all else here
    return workload.turns.draw(Random(f"{workload.seed}/{number}/turns"))


def conversation(workload: Workload, number: int, at_s: float | None = None) -> Iterator[PlannedRequest]:
    """Yield the requests of a conversation, each the user's part of one turn; only the first has a shared prefix."""
    yield planned_request(workload, number, at_s)
    for turn in range(1, turns(workload, number)):
        chance = Random(f"{workload.seed}/{number}/{turn}")
        length, output = workload.prompt_tokens.draw(chance), workload.output_tokens.draw(chance)
        prompt = " ".join(chance.choices(WORDS, k=length))
        leave = _leave(workload, output, chance) if chance.random() < workload.cancel_rate else None
        yield PlannedRequest(number, prompt, output, None, leave, turn)


def planned_requests(pace: Pace, workload: Workload) -> int | None:
    """Return the number of requests of a run, None if only its duration limits them."""
    if pace.requests is None:
        return None
    return sum(turns(workload, number) for number in range(pace.requests))


# Prompts that share their beginning -------------------------------------------------------


def traced_prompt(workload: Workload, traced: TracedRequest, number: int) -> str:
    """Return a prompt of about as many tokens as the trace says, of its blocks; what they do not fill is its own."""
    words: list[str] = []
    wanted = max(1, traced.prompt_tokens)
    blocks = traced.blocks if number >= 0 else ()  # else the warm-up would fill the server's cache
    for block in blocks[: -(-wanted // workload.block_tokens)]:
        words += _shared(f"{workload.seed}/block/{block}", workload.block_tokens)
    if (missing := wanted - len(words)) > 0:
        words += _words(f"{workload.seed}/{number}/own", missing)
    return " ".join(words[:wanted])


def prefix(workload: Workload, number: int) -> str:
    """Return one of the shared beginnings."""
    name = f"{workload.seed}/prefix/{number}"
    return " ".join(_shared(name, workload.prefix_tokens.draw(Random(name))))


def _words(seed: str, count: int) -> tuple[str, ...]:
    return tuple(BYTE_WORDS[byte] for byte in Random(seed).randbytes(count))


_shared = lru_cache(maxsize=BLOCKS_KEPT_MAX)(_words)


def _leave(workload: Workload, output_tokens: int, chance: Random) -> EarlyDisconnect:
    if chance.random() < CANCEL_EARLY or output_tokens < 2:
        # Evenly over the orders of magnitude, since the time to a first token is unknown.
        return EarlyDisconnect(0, workload.cancel_within_s * EARLIEST ** chance.random())
    return EarlyDisconnect(chance.randint(1, output_tokens - 1))


# Times ------------------------------------------------------------------------------------


def arrivals(seed: int, rate: float, burstiness: float = 1.0) -> Iterator[float]:
    """Yield the times of arrivals of `rate` a second, without end, in seconds after the start.

    Their gaps have a gamma distribution of the shape `burstiness`; 1 is a Poisson process.
    """
    chance, at_s, scale = Random(f"{seed}/arrivals"), 0.0, 1 / (rate * burstiness)
    while True:
        at_s += chance.expovariate(rate) if burstiness == 1 else chance.gammavariate(burstiness, scale)
        yield at_s


def times(pace: Pace, workload: Workload) -> Iterator[float]:
    """Yield the times of an open loop; a trace ends with its last line."""
    if pace.rate is not None:
        return arrivals(workload.seed, pace.rate, pace.burstiness)
    return (traced.at_s / pace.trace_speed for traced in workload.trace)


def share(pace: Pace, workload: Workload, worker: int, workers: int) -> Iterator[tuple[int, float | None]]:
    """Yield number and time of each request that one of `workers` sends, in order.

    In a closed loop there are no times, and only `requests` ends it: the sender watches the clock.
    """
    if not pace.open_loop:
        numbers = count(worker, workers) if pace.requests is None else range(worker, pace.requests, workers)
        yield from ((number, None) for number in numbers)
        return
    for number, at_s in islice(enumerate(times(pace, workload)), pace.requests):
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
