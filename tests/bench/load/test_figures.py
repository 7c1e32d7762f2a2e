"""The figures of a page are those of the records."""

from array import array
from collections.abc import Sequence
from typing import Any

from bench.load import measure, report
from bench.load.figures import figures
from bench.load.messages import Fault, Record
from bench.rig.result import PERCENTS, Curve, Distribution, Figure, Table


def record(number: int, sent_s: float, stamps: Sequence[float], **fields: Any) -> Record:
    usual: dict[str, Any] = {"ending": "completed", "ended_s": stamps[-1] if stamps else 0.0} | fields
    return Record(number=number, sent_s=sent_s, stamps=array("d", stamps).tobytes(), **usual)


def drawn(records: Sequence[Record], length_s: float) -> dict[str, Figure]:
    found = figures(records, measure.Window(0.0, length_s), report.tokens(records))
    return {figure.title: figure for figure in found}


def test_what_came_over_time_is_counted_where_it_came() -> None:
    records = [record(0, 0.0, [0.05, 0.15]), record(1, 0.1, [0.35]), record(2, 0.5, [9.0])]
    found = drawn(records, 1.0)
    tokens, running = found["Output tokens a second over time"], found["Requests under way over time"]
    assert isinstance(tokens, Curve)
    assert isinstance(running, Curve)
    assert [round(values[0]) for _, values in tokens.series[""]] == [10, 10, 0, 0, 10, 0, 0, 0, 0, 0]
    assert [values[0] for _, values in running.series[""]] == [1, 2, 1, 1, 1, 1, 1, 1, 1, 1]


def test_distributions_are_of_completed_requests_alone() -> None:
    failed = record(1, 0.0, [5.0], ending="failed", fault=Fault("http", "500"))
    found = drawn([record(0, 0.0, [0.1, 0.2]), failed], 1.0)
    first = found["Time to the first token"]
    assert isinstance(first, Distribution)
    assert first.series[""] == [100.0] * len(PERCENTS)
    requests = found["Requests and tokens"]
    assert isinstance(requests, Table)
    assert ["failed: http 500", 1.0] in [list(row) for row in requests.rows]


def test_a_run_without_answers_has_no_distributions_and_no_curves() -> None:
    assert set(drawn([], 0.0)) == {"Requests and tokens", "Times of completed requests"}
