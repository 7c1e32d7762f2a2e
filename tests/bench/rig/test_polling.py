"""The time of an abort is that of the engines' own counts."""

from pathlib import Path
from typing import Any

import pytest

from bench.pair_abort_times import Report
from bench.rig.cluster import LOAD_GAUGES, Cluster, Plan
from bench.rig.polling import GIVE_UP_S, SETTLE_S, LoadPoller, PairLoad, RequestNotReleased

IDLE = dict.fromkeys(LOAD_GAUGES, 0.0)
BUSY = IDLE | {"running": 1.0}
ONLY_KV = IDLE | {"kv_tokens_used": 16.0}


class Scripted(LoadPoller):
    """A poller whose loads are scripted: time, both engines, and the requests of the front."""

    def __init__(self, tmp_path: Path, *script: tuple[float, dict[str, float], dict[str, float], int]) -> None:
        super().__init__(Cluster(Plan({}), tmp_path), pause_s=0.0)
        self.script, self.fronts = list(script), list[bool]()

    def read(self, *, front: bool = True) -> PairLoad:
        read_at, prefill, decode, running = self.script.pop(0)
        if not self.script:  # the last stays true
            self.script.append((read_at + SETTLE_S, prefill, decode, running))
        self.fronts.append(front)
        return PairLoad(prefill, decode, read_at, running) if front else PairLoad(prefill, decode, read_at)


def test_a_pair_is_idle_when_neither_engine_holds_a_request_or_kv_memory(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (10.0, BUSY, BUSY, 0), (10.1, IDLE, ONLY_KV, 0), (10.2, IDLE, IDLE, 0))
    assert poll.until_idle(10.0) == pytest.approx(0.2)


def test_engines_that_have_not_received_a_request_yet_are_not_idle(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (5.0, IDLE, IDLE, 1), (5.1, IDLE, IDLE, 1), (5.2, BUSY, IDLE, 1), (5.3, IDLE, IDLE, 0))
    assert poll.until_idle(5.0) == pytest.approx(0.3)


def test_engines_that_were_free_before_the_front_was_quiet_count_from_when_they_were_free(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (5.1, IDLE, IDLE, 1), (5.2, IDLE, IDLE, 1), (5.3, IDLE, IDLE, 0))
    assert poll.until_idle(5.0) == pytest.approx(0.1)


def test_the_front_is_left_alone_until_the_engines_are_free(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (1.0, BUSY, IDLE, 0), (1.1, BUSY, IDLE, 0), (1.2, IDLE, IDLE, 0))
    poll.until_idle(1.0)
    assert poll.fronts[:4] == [False, False, False, True]


def test_a_request_that_is_not_released_raises_an_error(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (1.0, IDLE, ONLY_KV, 0), (2.0 + GIVE_UP_S, IDLE, ONLY_KV, 0))
    with pytest.raises(RequestNotReleased, match=r"'kv_tokens_used': 16\.0"):
        poll.until_idle(1.0)


def found(*taken_ms: float) -> list[Any]:
    return [(ms / 1000, True) for ms in taken_ms]


def test_nine_tries_of_ten_must_be_within_the_target() -> None:
    report = Report("simulated")
    report.add("streaming", found(*[5.0] * 45, *[19.0] * 5), PairLoad(IDLE, IDLE, 0.0))
    assert report.wrong == []
    report.add("streaming", found(*[5.0] * 44, *[21.0] * 6), PairLoad(IDLE, IDLE, 0.0))
    assert report.wrong == ["streaming: p90 over 20 ms"]


def test_what_a_stage_leaves_in_the_engines_is_a_leak_in_requests_and_tokens() -> None:
    report = Report("sglang")
    report.add("n = 3", found(5.0), PairLoad(BUSY | {"waiting": 2.0}, ONLY_KV, 0.0))
    assert report.wrong == ["n = 3: leaked 3 / 16"]
