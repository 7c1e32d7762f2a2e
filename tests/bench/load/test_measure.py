"""Figures are what their definitions say, against the standard library and counting by hand."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from bench.load import measure
from bench.load.messages import Fault, Record


def record(*, stamps: Sequence[float] = (), **fields: Any) -> Record:
    usual: dict[str, Any] = {"number": 0, "sent_s": 0.0, "ended_s": 1.0} | fields
    return Record(**usual, stamps=array("d", stamps).tobytes())


def test_times_of_one_request_are_as_defined() -> None:
    request = record(stamps=[0.5, 0.6, 0.8], ended_s=0.9, output_tokens=5)
    assert measure.ttft_s(request) == 0.5
    assert list(measure.gaps(request)) == pytest.approx([0.1, 0.2])
    assert measure.tpot_s(request) == pytest.approx((0.9 - 0.5) / 4)  # by the server's count, not by events


def test_latencies_are_those_of_completed_requests() -> None:
    records = [
        record(stamps=[0.1, 0.2], ended_s=0.2, connect_s=0.01),
        record(stamps=[9.0], ended_s=50.0, fault=Fault("timeout", "mid-stream")),
    ]
    found = measure.latencies(records)
    assert {name: each.count for name, each in found.items()} == dict.fromkeys(measure.DEFINITIONS, 1)
    assert found["ttft"].most == 100.0
    assert found["e2e"].most == pytest.approx(200.0)


def test_rates_count_what_came_within_the_window() -> None:
    records = [
        record(stamps=[0.5, 0.9], ended_s=0.9, output_tokens=4, prompt_tokens=10),  # two tokens an event
        record(sent_s=0.9, stamps=[0.05, 0.5], ended_s=0.5, prompt_tokens=10),  # ends too late
        record(sent_s=0.1, stamps=[0.1], fault=Fault("truncated", "closed")),
    ]
    found = measure.rates(records, measure.window(records, 1.0))
    assert found == {"requests_per_s": 1.0, "output_tokens_per_s": 4 + 1 + 1, "prompt_tokens_per_s": 10.0}


def test_without_a_duration_the_window_is_from_the_first_sending_to_the_last_end() -> None:
    assert measure.window([record(sent_s=0.5, ended_s=1.0), record(sent_s=0.7, ended_s=2.0)]) == (0.5, 2.7)
    assert measure.rates([], measure.window([]))["requests_per_s"] == 0.0
