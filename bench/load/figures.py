"""The figures of a load for its page: distributions of the times, and how the run went over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from bench.load import measure
from bench.load.measure import DEFINITIONS, Summary
from bench.load.messages import Record
from bench.rig.result import Cell, Curve, Distribution, Figure, Table, distribution

BINS_MAX = 120
BIN_S_LEAST = 0.1


def figures(records: Sequence[Record], over: measure.Window, tokens: Mapping[str, object]) -> list[Figure]:
    """Return the figures of a run."""
    return [
        _requests(records, over, tokens),
        _latencies(records),
        *_turns(records),
        *_distributions(records),
        *_over_time(records, over),
    ]


def _requests(records: Sequence[Record], over: measure.Window, tokens: Mapping[str, object]) -> Table:
    ends, rates = measure.endings(records), measure.rates(records, over)
    rows: list[tuple[Cell, Cell]] = [
        ("requests sent", len(records)),
        ("completed", ends.completed),
        ("left as planned", ends.cancelled),
        ("failed", ends.failed),
        ("prompt tokens", _number(tokens["prompt"])),
        ("of them cached by the server", _number(tokens["cached"])),
        ("output tokens", _number(tokens["output"])),
        ("requests/s", rates["requests_per_s"]),
        ("output tokens/s", rates["output_tokens_per_s"]),
        ("prompt tokens/s", rates["prompt_tokens_per_s"]),
    ]
    errors = [(f"failed: {each.kind} {each.code}", float(each.count)) for each in measure.errors(records)]
    return Table(title="Requests and tokens", columns=("", "value"), rows=[*rows, *errors])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _latencies(records: Sequence[Record]) -> Table:
    rows = [_row(name, summary) for name, summary in measure.latencies(records).items() if summary.count]
    columns = ("ms", "p50", "p90", "p99", "max", "mean", "samples")
    return Table(title="Times of completed requests", columns=columns, rows=rows, note=DEFINITIONS_NOTE)


DEFINITIONS_NOTE = " ".join(f"{name}: {DEFINITIONS[name]}." for name in ("ttft", "itl", "tpot", "e2e"))


def _row(name: str, summary: Summary) -> list[Cell]:
    return [name, summary.p50, summary.p90, summary.p99, summary.most, summary.mean, summary.count]


def _turns(records: Sequence[Record]) -> list[Table]:
    """Return a row for each turn of the conversations, if there are any."""
    rows: list[list[Cell]] = []
    for turn in range(1 + max((record.turn for record in records), default=0)):
        answered = [record for record in records if record.turn == turn and record.ending == "completed"]
        if answered:
            first = measure.summarise((at_s for each in answered if (at_s := measure.ttft_s(each)) is not None), 1e3)
            prompts = sum(each.prompt_tokens or 0 for each in answered) / len(answered)
            cached = sum(each.cached_tokens or 0 for each in answered) / len(answered)
            rows.append([str(turn + 1), len(answered), prompts, cached, first.p50, first.p99])
    columns = ("turn", "completed", "prompt tokens, mean", "cached, mean", "first token p50, ms", "p99, ms")
    return [Table(title="Turns of the conversations", columns=columns, rows=rows)] if len(rows) > 1 else []


def _distributions(records: Sequence[Record]) -> list[Distribution]:
    completed = [record for record in records if record.ending == "completed"]
    samples: dict[str, Iterable[float | None]] = {
        "Time to the first token": map(measure.ttft_s, completed),
        "Time between tokens": (gap for record in completed for gap in measure.gaps(record)),
        "Time of a whole request": (record.ended_s for record in completed),
    }
    drawn = {
        title: distribution((value for value in values if value is not None), 1e3) for title, values in samples.items()
    }
    return [Distribution(title=title, unit="ms", series={"": values}) for title, values in drawn.items() if values]


def _bin(at_s: float, begin_s: float, bin_s: float) -> int:
    return int((at_s - begin_s) / bin_s)


def _over_time(records: Sequence[Record], over: measure.Window) -> list[Curve]:
    if over.length_s <= 0:
        return []
    bin_s = max(BIN_S_LEAST, over.length_s / BINS_MAX)
    bins = max(1, int(over.length_s / bin_s))  # the last, which is not whole, is left out
    produced, ended, running = Counter[int](), Counter[int](), Counter[int]()
    for record in records:
        place = partial(_bin, begin_s=over.begin_s - record.sent_s, bin_s=bin_s)
        for at_s, count in zip(measure.stamps(record), measure.weights(record), strict=True):
            produced[place(at_s)] += count
        ended[place(record.ended_s)] += 1
        running.update(range(max(0, place(0.0)), min(bins, place(record.ended_s) + 1)))

    def curve(title: str, unit: str, counts: Counter[int], divisor: float) -> Curve:
        points = [(over.begin_s + place * bin_s, [counts[place] / divisor]) for place in range(bins)]
        return Curve(title=title, x="s after the start", unit=unit, series={"": points})

    return [
        curve("Output tokens a second over time", "tokens/s", produced, bin_s),
        curve("Requests that ended, a second, over time", "requests/s", ended, bin_s),
        curve("Requests under way over time", "requests", running, 1.0),
    ]
