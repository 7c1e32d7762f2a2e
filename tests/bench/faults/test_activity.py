"""An engine counts as computing by its CPU time, and for a limited time; the processes that are killed, and streams on them."""

from __future__ import annotations

import pytest

from bench.faults.activity import Window, computing, engine_processes
from bench.faults.servers import distinguishable, node, parent, scheduler
from bench.rig.processes import ProcessEntry

IDLE, BUSY = 0.01, 0.9
THRESHOLD = 0.1


def observed(*shares: float) -> list[Window]:
    return [Window(0.1 * (number + 1), share) for number, share in enumerate(shares)]


def entry(pid: int, command: str) -> ProcessEntry:
    return ProcessEntry(pid, 1, pid, "1", "S", command)


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


def test_a_victim_is_one_process_of_one_worker() -> None:
    processes = [
        entry(1, "python -m supervisor a.toml"),
        ProcessEntry(2, 1, 2, "1", "S", "python -m supervisor a.toml --node worker-0"),
        ProcessEntry(4, 2, 4, "1", "S", "python -m host"),
        ProcessEntry(5, 4, 5, "1", "S", "sglang::scheduler"),
        ProcessEntry(6, 4, 6, "1", "S", "sglang::scheduler"),
    ]
    assert [victim(processes) for victim in (scheduler, parent, node)] == [5, 4, 2]
    assert [victim(processes[:1]) for victim in (scheduler, parent, node)] == [None, None, None]


@pytest.mark.parametrize(
    ("moved", "apart"),
    [([0, 0, 10, 14], True), ([0, 0, 9, 14], False), ([0, 0, 0, 0], False), ([], False), ([10, 11], True)],
)
def test_stopped_streams_are_distinguishable_once_the_moving_ones_have_moved_far(moved: list[int], apart: bool) -> None:
    assert distinguishable(moved) == apart
