"""Each stage of `media-abort-times` once: a client that leaves with a picture leaves nothing in any process."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench.faults.media_aborts import NARROW, WIDE, measure
from bench.faults.scenario import Run

pytestmark = [pytest.mark.realtime, pytest.mark.nightly]


@pytest.mark.parametrize("narrow", [False, True], ids=["on its way", "waiting for the encoder"])
def test_nothing_is_left_of_a_picture_whose_client_leaves_at_any_stage(folder: Path, narrow: bool) -> None:
    run = Run(Namespace(tries=1, only=""), folder)
    measure(run, narrow=narrow)
    assert len(run.rows) == len(NARROW if narrow else WIDE)
    assert [sentence for sentence in run.wrong if "p99" not in sentence] == []
