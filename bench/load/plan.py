"""The plan of a load, as pure data: the same seed gives the same requests for any number of processes.

Each request is drawn from the seed and its own number alone, so its contents depend neither on the order of sending nor
on the sending process. Worker `w` of `n` sends the requests whose number is `w` modulo `n`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
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


@frozen
class PlannedRequest:
    """One planned request; `at_s` is when it is due after the start, None where a client sends it once it is free."""

    number: int
    prompt: str
    output_tokens: int
    at_s: float | None = None


@frozen(kw_only=True)
class Workload:
    """The size of random requests, or the requests themselves."""

    seed: int = 0
    prompt_tokens: int = 128
    output_tokens: int = 128
    requests: tuple[PlannedRequest, ...] = ()  # instead of random ones; the warm-up stays random


@frozen(kw_only=True)
class Pace:
    """When requests are sent: by `clients` that each wait for their answer; without, each request needs a time."""

    clients: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0  # requests sent and answered before the clock starts, and not counted
    warm_connections: bool = False  # clients keep the connections of the warm-up


def planned_request(workload: Workload, number: int) -> PlannedRequest:
    """Return the request of this number; negative numbers are the warm-up."""
    if workload.requests and number >= 0:
        return workload.requests[number]
    chance = Random(f"{workload.seed}/{number}")  # seeded by text, since hashes differ between processes
    prompt = " ".join(chance.choices(WORDS, k=workload.prompt_tokens))
    return PlannedRequest(number, prompt, workload.output_tokens)


def share(pace: Pace, workload: Workload, worker: int, workers: int) -> Iterator[PlannedRequest]:
    """Yield the requests that one of `workers` sends, in order; without a number of them there is no end."""
    requests = len(workload.requests) or pace.requests
    numbers = count(worker, workers) if requests is None else range(worker, requests, workers)
    return (planned_request(workload, number) for number in numbers)


def warmup_share(pace: Pace, worker: int, workers: int) -> range:
    """Return the numbers of the warm-up requests that one of `workers` sends: -1, -2, and so on."""
    return range(-1 - worker, -1 - pace.warmup, -workers)


def clients_per_worker(total: int, worker: int, workers: int) -> int:
    """Return how many of `total` clients belong to one of `workers`."""
    return len(range(worker, total, workers))
