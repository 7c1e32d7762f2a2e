"""The memory of a node stays flat, however many images it prepares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.media_memory import growth


@pytest.mark.realtime
@pytest.mark.nightly
async def test_images_leave_nothing_behind(tmp_path: Path) -> None:
    left = await growth(300, tmp_path)
    assert left.resident_kb < 2_000
    assert left.descriptors <= 1  # of a thread that is kept
    assert left.held_bytes == 0
    assert left.same_processes
