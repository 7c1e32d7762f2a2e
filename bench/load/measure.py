"""Statistics, each with its definition. All samples of all workers are kept, so percentiles are exact.

Latencies are of completed requests only: the others end when their client disconnects or when they fail.
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
    "itl": "gap between one token and the next: the gap between two events with content, which counts as one token "
    "each, unless the server's running usage says how many tokens an event brought; then its gap is spread evenly "
    "over them. Events that are read together are 0 apart",
    "tpot": "one value a request: (e2e - ttft) / (output tokens - 1), by the server's usage where it says one",
    "e2e": "from the request's first byte handed to the socket to its last event: [DONE], or the response's own",
    "connect": "opening a connection, with TLS and the WebSocket handshake; in none of the other times",
    "cancel": "from `response.cancel` to the response's last event",
    "send_lag": "open loop: how much later than planned the client began with a request; its own slowness",
    "held": "open loop: how long --concurrency-max held a request back; in none of the other times",
    "loop_lag": "how late the client's loop woke from sleeps of 10 ms; its own slowness, and up to 1 ms by which "
    "the system rounds a sleep",
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


def weights(record: Record) -> array[int]:
    """Return the number of tokens of each event."""
    counts = array("I")
    if record.weights:
        counts.frombytes(record.weights)
        return counts
    return array("I", [1]) * (len(record.stamps) // 8)


def tokens(record: Record) -> int:
    """Return the number of output tokens of a request: by the server's usage, else counted from its events."""
    return sum(weights(record)) if record.output_tokens is None else record.output_tokens


def gaps(record: Record) -> Iterable[float]:
    """Yield the gaps between the tokens of a request, in seconds."""
    for (before, now), count in zip(pairwise(stamps(record)), weights(record)[1:], strict=True):
        for _ in range(count):
            yield (now - before) / count


def ttft_s(record: Record) -> float | None:
    """Return the time to the first token, None without one."""
    times = stamps(record)
    return times[0] if times else None


def tpot_s(record: Record) -> float | None:
    """Return the time per output token after the first, None without one."""
    first, count = ttft_s(record), tokens(record)
    return None if first is None or count < 2 else (record.ended_s - first) / (count - 1)


# All requests -------------------------------------------------------------------------------------


@frozen
class Window:
    """The time over which rates are computed, in seconds after the start."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.begin_s


def window(records: Sequence[Record], duration_s: float | None) -> Window:
    """Return the given duration; without one, from the first request's sending to the last one's end."""
    if duration_s is not None:
        return Window(0.0, duration_s)
    if not records:
        return Window(0.0, 0.0)
    return Window(min(r.sent_s for r in records), max(r.sent_s + r.ended_s for r in records))


def latencies(records: Sequence[Record]) -> dict[str, Summary]:
    """Summarise the times of all requests, in milliseconds."""
    completed = [record for record in records if record.ending == "completed"]
    samples: dict[str, Iterable[float | None]] = {
        "ttft": map(ttft_s, completed),
        "itl": (gap for record in completed for gap in gaps(record)),
        "tpot": map(tpot_s, completed),
        "e2e": (record.ended_s for record in completed),
        "connect": (record.connect_s for record in records),
        "cancel": (record.cancel_s for record in records),
    }
    return {name: summarise((value for value in values if value is not None), 1e3) for name, values in samples.items()}


def rates(records: Sequence[Record], over: Window) -> dict[str, float]:
    """Return requests and tokens a second. A token in the window counts even if its request did not complete."""
    if over.length_s <= 0:
        return {"requests_per_s": 0.0, "output_tokens_per_s": 0.0, "prompt_tokens_per_s": 0.0}
    completed = [r for r in records if r.ending == "completed" and r.sent_s + r.ended_s <= over.end_s]
    produced = 0.0
    for record in records:
        counts = weights(record)
        if counted := sum(counts):
            times = zip(stamps(record), counts, strict=True)
            inside = sum(count for at_s, count in times if over.begin_s <= record.sent_s + at_s <= over.end_s)
            produced += tokens(record) * inside / counted
    return {
        "requests_per_s": len(completed) / over.length_s,
        "output_tokens_per_s": produced / over.length_s,
        "prompt_tokens_per_s": sum(r.prompt_tokens or 0 for r in completed) / over.length_s,
    }


@frozen
class Endings:
    """The numbers of requests by their ending."""

    completed: int
    cancelled: int
    failed: int
    cancelled_before_first: int
    planned_cancels: int
    finished_first: int  # requests that completed before their planned disconnect
    finishes: dict[str, int]


def endings(records: Sequence[Record]) -> Endings:
    """Count how requests ended."""
    counts = Counter(record.ending for record in records)
    cancelled = [record for record in records if record.ending == "cancelled"]
    planned = [record for record in records if record.leave_tokens is not None]
    return Endings(
        completed=counts["completed"],
        cancelled=counts["cancelled"],
        failed=counts["failed"],
        cancelled_before_first=sum(not record.stamps for record in cancelled),
        planned_cancels=len(planned),
        finished_first=sum(record.ending == "completed" for record in planned),
        finishes=dict(Counter(r.finish or "none" for r in records if r.ending == "completed")),
    )


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
