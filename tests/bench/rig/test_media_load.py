"""The time of an abort with pictures is that of all counts together, and whatever is left is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.media_abort_times import TARGET_P99_MS, Report
from bench.media_stages import NARROW, WIDE
from bench.rig.cluster import Cluster, Plan
from bench.rig.media_load import MediaLoad, MediaPoller, Remains, memory_files, series
from bench.rig.polling import GIVE_UP_S, SETTLE_S, RequestNotReleased

SCRAPE = """\
# HELP espalier_media_bytes Memory of images and videos of requests
espalier_media_bytes{kind="fetched"} 1048576.0
espalier_media_bytes{kind="prepared"} 0.0
espalier_link_streams{peer="encoder",side="asked"} 2.0
espalier_link_streams{peer="encoder",side="served"} 1.0
espalier_node_tasks 40.0
"""
IDLE = {"front media_bytes": 0.0, "decoders": 0.0}
BUSY = IDLE | {"decoders": 1.0}


class Scripted(MediaPoller):
    """A poller whose loads are scripted: time and what is held."""

    def __init__(self, tmp_path: Path, *script: tuple[float, dict[str, float]]) -> None:
        self.script = [MediaLoad(held, read_at) for read_at, held in script]
        super().__init__(Cluster(Plan({}), tmp_path), pause_s=0.0)

    def __post_init__(self) -> None:
        """Have no node with decoders."""

    def read(self, others: object = ()) -> MediaLoad:
        load = self.script.pop(0)
        if not self.script:  # the last stays true
            self.script.append(MediaLoad(load.held, load.at + SETTLE_S))
        return load


def test_the_series_of_a_scrape_are_those_that_requests_hold() -> None:
    assert series(SCRAPE) == {
        'media_bytes{kind="fetched"}': 1048576.0,
        'media_bytes{kind="prepared"}': 0.0,
        'link_streams{peer="encoder",side="asked"}': 2.0,
    }


def test_a_load_names_what_is_held() -> None:
    load = MediaLoad({f"front {name}": value for name, value in series(SCRAPE).items()}, 1.0)
    assert not load.idle
    assert load.total("front", "media_bytes") == 1048576.0
    assert load.total("link_streams", "encoder") == 2.0
    assert load.sentences()[0] == 'front media_bytes{kind="fetched"} is 1.04858e+06'
    with pytest.raises(AssertionError, match="no node has a series"):
        load.total("nothing of the kind")


def test_a_load_is_within_another_if_nothing_is_more() -> None:
    assert MediaLoad(IDLE, 1.0).within(MediaLoad(BUSY, 0.0))
    assert not MediaLoad(BUSY, 1.0).within(MediaLoad(IDLE, 0.0))
    assert not MediaLoad({"new": 1.0}, 1.0).within(MediaLoad(IDLE, 0.0))


def test_a_request_is_released_when_nothing_is_held_for_good(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (10.0, BUSY), (10.1, IDLE), (10.11, BUSY), (10.2, IDLE))
    assert poll.until_idle(9.9) == pytest.approx(0.3)


def test_what_is_never_released_is_named(tmp_path: Path) -> None:
    poll = Scripted(tmp_path, (1.0, BUSY), (2.0 + GIVE_UP_S, BUSY))
    with pytest.raises(RequestNotReleased, match="still held: decoders is 1"):
        poll.until_idle(1.0)


def test_files_in_memory_are_counted_open_or_mapped() -> None:
    before = memory_files(os.getpid())
    descriptor = os.memfd_create("media")
    assert memory_files(os.getpid()) == before + 1
    os.close(descriptor)
    assert memory_files(os.getpid()) == before


def test_only_what_is_more_than_before_is_left() -> None:
    before, now = Remains(30, 0, 5, 2), Remains(31, 3, 4, 2)
    assert now.beyond(before) == ["31 descriptors, 30 before", "3 memory files, 0 before"]
    assert before.within(before)
    assert not now.within(before)


def test_a_report_names_slow_stages_those_that_were_not_reached_and_what_was_left() -> None:
    report = Report()
    report.add("fine", [(0.01, True)] * 10, [])
    report.add("slow", [(0.01, True)] * 9 + [(TARGET_P99_MS / 900, True)], [])
    report.add("missed", [(0.01, False)] * 10, [])
    report.add("leaky", [(0.01, True)] * 10, ["front: 31 descriptors, 30 before"])
    assert [sentence.partition(":")[0] for sentence in report.wrong] == ["slow", "missed", "leaky"]
    assert len(report.rows) == 4


def test_the_six_stages_before_an_answer_are_there() -> None:
    names = " ".join([*WIDE, *NARROW])
    words = (
        "fetching",
        "decoding",
        "waiting for a slot",
        "encoding",
        "sending",
        "prefill waiting",
        "prefill computing",
    )
    assert all(word in names for word in words)
