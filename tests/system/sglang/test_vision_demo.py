"""`make demo-vision` answers stock clients with what their pictures show."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import vision_demo
from bench.rig.node import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # openai calls websockets the older way
def test_the_demonstration_says_what_pictures_show_and_leaves_nothing(folder: Path) -> None:
    assert (ROOT / "examples" / vision_demo.MODEL).is_dir()
    assert vision_demo.measure(folder) == []
