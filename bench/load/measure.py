"""Statistics, each with its definition. All samples of all workers are kept, so percentiles are exact.

Latencies are of completed requests only: the others end when they fail.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import frozen

from bench.load.messages import Record
from bench.rig.result import percentile

PERCENTILES = (50, 90, 99)

DEFINITIONS = {
    "ttft": "from the request's first byte handed to the socket to the first event with content (text, reasoning, "
    "refusal or tool call; a role alone is none)",
    "itl": "gap between two events with content; events that are read together are 0 apart",
    "tpot": "one value a request: (e2e - ttft) / (output tokens - 1), by the server's usage where it has one",
    "e2e": "from the request's first byte handed to the socket to its last event: [DONE], or the response's own",
    "connect": "opening a connection, with a WebSocket's handshake; in none of the other times",
}


@frozen
class Summary:
    """Statistics of many samples, in their unit; nothing but the count where there are none."""

    count: int
    mean: float | None = None
    least: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    most: float | None = None


def summarise(samples: Iterable[float], scale: float = 1.0) -> Summary:
    """Return the statistics of samples, each multiplied by `scale`."""
    ordered = sorted(samples)
    if not ordered:
        return Summary(0)
    p50, p90, p99 = (percentile(ordered, percent) * scale for percent in PERCENTILES)
    mean = sum(ordered) / len(ordered)
    return Summary(len(ordered), mean * scale, ordered[0] * scale, p50, p90, p99, ordered[-1] * scale)


# One request ------------------------------------------------------------------------------


def stamps(record: Record) -> array[float]:
    """Return when each event with content came, in seconds after the request was sent."""
    times = array("d")
    times.frombytes(record.stamps)
    return times


def tokens(record: Record) -> int:
    """Return the number of output tokens of a request: by the server's usage, else counted from its events."""
    return len(record.stamps) // 8 if record.output_tokens is None else record.output_tokens


def gaps(record: Record) -> Iterable[float]:
    """Yield the gaps between the events with content of a request, in seconds."""
    return (now - before for before, now in pairwise(stamps(record)))


def ttft_s(record: Record) -> float | None:
    """Return the time to the first token, None without one."""
    times = stamps(record)
    return times[0] if times else None


def tpot_s(record: Record) -> float | None:
    """Return the time per output token after the first, None without one."""
    first, count = ttft_s(record), tokens(record)
    return None if first is None or count < 2 else (record.ended_s - first) / (count - 1)


# All requests -------------------------------------------------------------------------------------


def window(records: Sequence[Record], duration_s: float | None = None) -> tuple[float, float]:
    """Return when the time over which rates are computed begins and ends, in seconds after the start.

    It is the given duration; without one, from the first request's sending to the last one's end.
    """
    if duration_s is not None or not records:
        return 0.0, duration_s or 0.0
    return min(r.sent_s for r in records), max(r.sent_s + r.ended_s for r in records)


def completed(records: Iterable[Record]) -> list[Record]:
    """Return the requests that did not fail."""
    return [record for record in records if record.fault is None]


def latencies(records: Sequence[Record]) -> dict[str, Summary]:
    """Summarise the times of all requests, in milliseconds."""
    whole = completed(records)
    samples: dict[str, Iterable[float | None]] = {
        "ttft": map(ttft_s, whole),
        "itl": (gap for record in whole for gap in gaps(record)),
        "tpot": map(tpot_s, whole),
        "e2e": (record.ended_s for record in whole),
        "connect": (record.connect_s for record in records),
    }
    return {name: summarise((value for value in values if value is not None), 1e3) for name, values in samples.items()}


def rates(records: Sequence[Record], over: tuple[float, float]) -> dict[str, float]:
    """Return requests and tokens a second. A token in the window counts even if its request did not complete."""
    begin_s, end_s = over
    length_s = max(end_s - begin_s, 1e-9)
    whole = [record for record in completed(records) if record.sent_s + record.ended_s <= end_s]
    produced = 0.0
    for record in records:
        if times := stamps(record):
            inside = sum(begin_s <= record.sent_s + at_s <= end_s for at_s in times)
            produced += tokens(record) * inside / len(times)
    return {
        "requests_per_s": len(whole) / length_s,
        "output_tokens_per_s": produced / length_s,
        "prompt_tokens_per_s": sum(record.prompt_tokens or 0 for record in whole) / length_s,
    }


@frozen
class Errors:
    """Failures of one kind and code, with the detail of the first."""

    kind: str
    code: str
    count: int
    example: str


def errors(records: Sequence[Record]) -> list[Errors]:
    """Group failures by kind and code, most first."""
    faults = [record.fault for record in records if record.fault is not None]
    counts = Counter((fault.kind, fault.code) for fault in faults)
    details = {(fault.kind, fault.code): fault.detail for fault in reversed(faults)}
    return [Errors(kind, code, count, details[kind, code]) for (kind, code), count in counts.most_common()]
