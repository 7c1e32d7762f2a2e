"""An engine counts as computing by its CPU time, and for a limited time."""

from __future__ import annotations

import os
import time

import pytest

from bench.rig.processes import ProcessEntry
from bench.zombies.activity import COUNTS, Window, computing, engine_processes, ran_s, windows

IDLE, BUSY = 0.01, 0.9
THRESHOLD = 0.1


def observed(*shares: float) -> list[Window]:
    return [Window(0.1 * (number + 1), share) for number, share in enumerate(shares)]


def entry(pid: int, command: str) -> ProcessEntry:
    return ProcessEntry(pid, 1, pid, "1", "S", command)


def test_an_engine_that_is_idle_at_once_has_not_computed() -> None:
    after = computing(iter(observed(*[IDLE] * 20)), THRESHOLD, limit_s=5.0, quiet_s=0.3)
    assert (after.computed_s, after.cpu_s, after.limited) == (0.0, 0.0, False)


def test_the_time_is_that_of_the_last_busy_window() -> None:
    after = computing(iter(observed(BUSY, BUSY, IDLE, BUSY, BUSY, *[IDLE] * 9)), THRESHOLD, limit_s=5.0, quiet_s=0.3)
    assert after.computed_s == pytest.approx(0.5)
    assert after.cpu_s == pytest.approx(4 * 0.1 * BUSY + 0.1 * IDLE)
    assert not after.limited


def test_a_single_busy_window_of_an_idle_engine_does_not_count() -> None:
    after = computing(iter(observed(BUSY, IDLE, BUSY, *[IDLE] * 9)), THRESHOLD, limit_s=5.0, quiet_s=0.3)
    assert after.computed_s == pytest.approx(0.1)


def test_an_engine_that_computes_at_the_limit_is_reported_as_such() -> None:
    after = computing(iter(observed(*[BUSY] * 30)), THRESHOLD, limit_s=2.0, quiet_s=0.3)
    assert after.limited
    assert after.computed_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("commands", "engines"),
    [
        (["python -m sglang.launch_server", "sglang::scheduler", "sglang::detokenizer"], [1]),
        (["python -m supervisor a.toml", "python -m actors.x.host", "sglang::scheduler", "sglang::scheduler"], [2, 3]),
        (["python -m dynamo.frontend", "python -m dynamo.mocker --model-path x"], [1]),
        (["python -m supervisor a.toml --node front", "python -m supervisor a.toml --node worker-0"], [1]),
        (["python -m supervisor a.toml"], [0]),
        (["python -m other"], []),
    ],
)
def test_the_processes_of_an_engine_are_found(commands: list[str], engines: list[int]) -> None:
    assert engine_processes([entry(pid, command) for pid, command in enumerate(commands)]) == engines


def test_only_counts_of_requests_are_read_from_metrics() -> None:
    text = """\
# TYPE espalier_requests_running gauge
espalier_requests_running 1.0
espalier_engine_waiting{engine="front/tiny-0"} 2.0
espalier_engine_kv_tokens_used{engine="front/tiny-0"} 3.0
dynamo_frontend_inflight_requests{model="tiny"} 4
"""
    assert [float(value) for _, value in COUNTS.findall(text)] == [1.0, 2.0, 4.0]


@pytest.mark.realtime
def test_windows_have_the_share_of_a_core_that_was_used() -> None:
    before = ran_s(os.getpid())
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        pass
    assert 0 < ran_s(os.getpid()) - before <= 1.0
    window = next(windows([os.getpid()], 0.05))
    assert window.end_s >= 0.05
    assert window.share < 0.9
    assert ran_s(2**22 + 1) == 0.0
