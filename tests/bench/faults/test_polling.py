"""The time of an abort is that from which on nothing is held for good; what is late, missed or left is named."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping

import pytest

from bench.faults.aborts import Limits, add
from bench.faults.polling import GIVE_UP_S, SETTLE_S, Held, Poller, RequestNotReleased, beyond, memory_files, series
from bench.faults.scenario import Run

SCRAPE = """\
# HELP espalier_media_bytes Memory of images and videos of requests
espalier_media_bytes{kind="fetched"} 1048576.0
espalier_link_streams{peer="encoder",side="asked"} 2.0
espalier_link_streams{peer="encoder",side="served"} 1.0
espalier_node_tasks 40.0
"""
IDLE = {"worker engine_running": 0.0, "worker engine_kv_tokens_used": 0.0}
BUSY = IDLE | {"worker engine_running": 1.0}
ONLY_KV = IDLE | {"worker engine_kv_tokens_used": 16.0}


class Scripted(Poller):
    """A poller whose loads are scripted: time, what the worker holds, and the requests of the front."""

    def __init__(self, *script: tuple[float, Mapping[str, float], float], engines_only: bool = True) -> None:
        super().__init__({}, ("worker",), 0.0, last="front", engines_only=engines_only)
        self.script, self.fronts = list(script), list[bool]()

    def read(self, *more: str) -> Held:
        at, held, running = self.script.pop(0)
        if not self.script:  # the last stays true
            self.script.append((at + SETTLE_S, held, running))
        self.fronts.append("front" in more)
        return Held({**held, **({"front requests_running": running} if "front" in more else {})}, at)


def test_the_series_of_a_scrape_are_those_that_requests_hold() -> None:
    assert series(SCRAPE) == {
        'media_bytes{kind="fetched"}': 1048576.0,
        'link_streams{peer="encoder",side="asked"}': 2.0,
    }


def test_what_is_held_has_sums_and_names() -> None:
    held = Held({"front a": 1.0, "front ab": 2.0, "other a": 4.0}, 1.0)
    assert (held.total("front", "a"), held.total("front", "a", "b"), held.idle) == (3.0, 2.0, False)
    assert held.sentences()[0] == "front a is 1"
    with pytest.raises(AssertionError, match="front has no series"):
        held.total("front", "nothing of the kind")


def test_engines_are_idle_when_they_hold_neither_a_request_nor_kv_memory() -> None:
    assert Scripted((10.0, BUSY, 0), (10.1, ONLY_KV, 0), (10.2, IDLE, 0)).until_idle(10.0) == pytest.approx(0.2)


def test_an_engine_that_has_not_received_a_request_yet_is_not_idle() -> None:
    poll = Scripted((5.0, IDLE, 1), (5.1, IDLE, 1), (5.2, BUSY, 1), (5.3, IDLE, 0))
    assert poll.until_idle(5.0) == pytest.approx(0.3)


def test_engines_that_were_free_before_the_front_was_quiet_count_from_when_they_were_free() -> None:
    assert Scripted((5.1, IDLE, 1), (5.2, IDLE, 1), (5.3, IDLE, 0)).until_idle(5.0) == pytest.approx(0.1)


def test_where_all_is_watched_nothing_at_all_may_be_held() -> None:
    media = IDLE | {"worker media_bytes": 8.0}
    poll = Scripted((1.0, media, 0), (1.1, IDLE, 0), engines_only=False)
    assert poll.until_idle(1.0) == pytest.approx(0.1)


def test_a_request_that_is_not_released_raises_an_error_with_what_is_held() -> None:
    poll = Scripted((1.0, ONLY_KV, 0), (2.0 + GIVE_UP_S, ONLY_KV, 0))
    with pytest.raises(RequestNotReleased, match="engine_kv_tokens_used is 16"):
        poll.until_idle(1.0)


def test_files_in_memory_are_counted_open_or_mapped() -> None:
    before = memory_files(os.getpid())
    descriptor = os.memfd_create("media")
    assert memory_files(os.getpid()) == before + 1
    os.close(descriptor)


def test_only_what_is_more_than_before_is_left() -> None:
    before, now = Counter(descriptors=30, threads=5), Counter(descriptors=31, threads=4, files=3)
    assert beyond(now, before) == ["31 descriptors, 30 before", "3 files, 0 before"]
    assert beyond(before, before) == []


@pytest.mark.parametrize(
    ("slow", "missed", "left", "wrong"),
    [
        (5, 0, [], []),
        (6, 0, [], ["a stage: p90 over 20 ms"]),
        (0, 6, [], ["a stage: only 44 of 50 tries left in their stage"]),
        (0, 0, ["front: 31 descriptors, 30 before"], ["a stage: left front: 31 descriptors, 30 before"]),
    ],
)
def test_a_stage_is_wrong_when_slow_when_missed_and_when_something_is_left(
    slow: int, missed: int, left: list[str], wrong: list[str]
) -> None:
    run = Run(argparse.Namespace())
    tries = [(0.021 if number < slow else 0.005, number >= missed) for number in range(50)]
    add(run, "a stage", tries, left, Limits(target_ms=20.0, reached_min=0.9))
    assert (run.wrong, len(run.rows)) == (wrong, 1)
