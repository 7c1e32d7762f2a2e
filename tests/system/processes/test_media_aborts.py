"""`bench.media_abort_times`, each stage once: a client that leaves with a picture leaves nothing in any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.media_abort_times import Report, measure
from bench.media_stages import NARROW, WIDE

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]


@pytest.mark.parametrize("narrow", [False, True], ids=["on its way", "waiting for the encoder"])
def test_nothing_is_left_of_a_picture_whose_client_leaves_at_any_stage(folder: Path, narrow: bool) -> None:
    stages, report = NARROW if narrow else WIDE, Report()
    measure(folder / "cluster", report, stages, 1, narrow=narrow)
    assert len(report.rows) == len(stages)
    assert [sentence for sentence in report.wrong if "p99" not in sentence] == []
