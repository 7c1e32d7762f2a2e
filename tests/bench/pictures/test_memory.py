"""What grows after the warm-up is named, and the cache's part of a run is what it says."""

from __future__ import annotations

from itertools import islice

import pytest

from bench.pictures.caching import PICTURES, TIMES, Run
from bench.pictures.caching import pictures as cached_pictures
from bench.pictures.memory import BOUNDS, Sample, pictures, table
from bench.pictures.senders import Tally, send, send_all
from bench.rig.node import free_port


def samples(*megabytes: float) -> list[tuple[int, Sample]]:
    values = dict.fromkeys(BOUNDS, 0.0)
    return [
        (100 * place, {("front", what): value for what, value in (values | {"MB": size}).items()})
        for place, size in enumerate(megabytes)
    ]


def test_what_grows_in_the_warm_up_alone_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(samples(50.0, 90.0, 90.0, 90.2, 90.1), 100) == []
    assert "GROWS" not in capsys.readouterr().out


def test_what_grows_on_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(samples(50.0, 90.0, 92.0, 94.0, 96.0), 100) == ["MB of front grows by 20.0 a thousand pictures"]
    assert "GROWS" in capsys.readouterr().out


def test_pictures_differ_in_one_part_and_are_repeated_in_the_other() -> None:
    assert len({url for _, url in pictures(0, 8)}) == 8
    names = [name for name, _ in islice(cached_pictures(), 2 * PICTURES)]
    assert names[:PICTURES] == names[PICTURES:]
    assert len(set(names)) == PICTURES
    assert TIMES > 1


def test_a_picture_that_was_not_encoded_is_a_hit() -> None:
    run = Run({"encoded": 50.0, "cached": 900.0, "shared": 50.0}, 0.1, {}, Tally())
    assert run.hit_rate == 0.95


def test_a_picture_that_reaches_no_server_counts_as_failed() -> None:
    tally = Tally()
    send(free_port(), "data:,", tally)
    send_all(free_port(), iter([("a", "data:,"), ("b", "data:,")]), 2, tally)
    assert (tally.outcomes["ConnectionRefusedError"], tally.failed) == (3, 3)
    tally.note("whole", 0.5, "a", "text")
    assert (tally.times_s, tally.texts, tally.failed) == ([0.5], {"a": {"text"}}, 3)
