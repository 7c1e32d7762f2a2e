"""A fixed small share of the damaged media. `python -m tests.system.fuzz.media` plays twenty thousand."""

from __future__ import annotations

import pytest

from protocol.messages.media import Modality
from tests.system.fuzz.media import run
from tests.system.fuzz.media_inputs import CHANGES, IMAGES, VIDEOS, make


@pytest.mark.realtime
def test_damaged_media_are_refused_or_come_out_in_their_shape() -> None:
    report = run(range(300))
    assert report.problems == []
    jobs = report.counts.pop("decoder jobs")
    assert sum(report.counts.values()) == 300 < jobs
    assert report.counts["survived as pixels"] > 10
    assert report.counts["invalid_request"] > 50


def test_an_input_is_the_same_whenever_it_is_made_and_every_kind_occurs() -> None:
    inputs = [make(number, seed=1) for number in range(700)]
    assert inputs[:50] == [make(number, seed=1) for number in range(50)]
    assert {each.about.partition(":")[0] for each in inputs} == {*IMAGES, *VIDEOS}
    assert {word for each in inputs for word in each.about.partition(": ")[2].split()} == {
        change.__name__.strip("_") for change in CHANGES
    }
    assert {each.modality for each in inputs} == set(Modality)
