"""The report of a run: a document with every figure, its unit and its definition, and the same as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from attrs import asdict

from bench.load import measure
from bench.load.measure import DEFINITIONS
from bench.load.messages import Job, Record
from bench.load.plan import Pace
from bench.load.process import Run
from bench.rig.result import Cell, Table, about
from bench.rig.table_text import tables_text

CPU_SHARE_MAX = 0.8
SECRET = "(not shown)"

Document = dict[str, object]


def document(job: Job, run: Run, words: Sequence[str], begun: datetime) -> Document:
    """Return every figure."""
    records, pace = run.records, job.pace
    over = measure.window(records, None if run.stopped else pace.duration_s)
    rates, times, tokens = measure.rates(records, over), measure.latencies(records), _tokens(records)
    errors, whole = measure.errors(records), measure.completed(records)
    requests: Document = {
        "sent": len(records),
        "completed": len(whole),
        "failed": len(records) - len(whole),
        "finishes": Counter(record.finish or "none" for record in whole),
    }
    key = job.target.key
    return {
        "schema": "espalier.bench.load/1",
        "title": f"{job.target.api} at {job.target.url}: {_pace_words(pace)}",
        **about(("load", *(SECRET if key and key in word else word for word in words)), begun),
        "notes": _warnings(run, pace, tokens),
        "figures": [_counts(requests, tokens, rates, errors), _latencies(times)],
        "requests": requests,
        "errors": [asdict(each) for each in errors],
        "latencies": {name: {"unit": "ms", **asdict(summary)} for name, summary in times.items()},
    }


def text(written: Document) -> str:
    """Return a document as text, its warnings last."""
    figures, notes = written["figures"], written["notes"]
    assert isinstance(figures, list)
    assert isinstance(notes, list)
    return "\n".join([f"{written['title']}\n", tables_text(figures), "", *notes]).rstrip()


def _tokens(records: Sequence[Record]) -> dict[str, int]:
    """Return the numbers of tokens of completed requests, by the server's usage; without one an event is a token."""
    whole = measure.completed(records)
    return {
        "prompt": sum(record.prompt_tokens or 0 for record in whole),
        "cached": sum(record.cached_tokens or 0 for record in whole),
        "output": sum(map(measure.tokens, whole)),
        "requests_without_usage": sum(record.output_tokens is None for record in whole),
    }


def _pace_words(pace: Pace) -> str:
    return "1 client" if pace.clients == 1 else f"{pace.clients} clients"


def _counts(
    requests: Document, tokens: dict[str, int], rates: dict[str, float], errors: Sequence[measure.Errors]
) -> Table:
    finishes = requests["finishes"]
    assert isinstance(finishes, Counter)
    rows: list[list[Cell]] = [[f"requests {name}", str(requests[name])] for name in ("sent", "completed", "failed")]
    rows += [[f"  finished by {name}", str(count)] for name, count in sorted(finishes.items())]
    rows += [[f"  {each.kind}: {each.code}: {each.example}", str(each.count)] for each in errors]
    names = {"prompt": "prompt tokens", "cached": "  of them cached by the server", "output": "output tokens"}
    rows += [[words, str(tokens[name])] for name, words in names.items()]
    rows += [[name.replace("_per_s", " a second").replace("_", " "), f"{value:,.2f}"] for name, value in rates.items()]
    return Table(title="Requests and tokens", columns=("", "value"), rows=rows)


def _latencies(times: dict[str, measure.Summary]) -> Table:
    rows: list[list[Cell]] = [
        [name, each.p50, each.p90, each.p99, each.most, each.mean, each.count]
        for name, each in times.items()
        if each.count
    ]
    note = " ".join(f"{name}: {DEFINITIONS[name]}." for name in times)
    columns = ("ms", "p50", "p90", "p99", "max", "mean", "samples")
    return Table(title="Times of completed requests", columns=columns, rows=rows, note=note)


def _warnings(run: Run, pace: Pace, tokens: dict[str, int]) -> list[str]:
    """Return what a reader of the figures must know, most important first."""
    lines = []
    if any(done.cpu_s > CPU_SHARE_MAX * done.wall_s for done in run.done):
        lines.append(f"SATURATED: a process of the load used over {CPU_SHARE_MAX:.0%} of a core; take more --processes")
    if run.warmup_faults:
        first = run.warmup_faults[0]
        lines.append(f"WARM-UP: {len(run.warmup_faults)} of {pace.warmup} failed: {first.kind} {first.code}")
    if tokens["requests_without_usage"]:
        lines.append(f"{tokens['requests_without_usage']} answers came without usage: their events count as tokens")
    if run.stopped:
        lines.append("STOPPED EARLY: what still ran is not counted")
    return lines
