"""The sections of pools and grids are read with their units, and become the grids of a router."""

from __future__ import annotations

import pytest

from actors.routing.pools.grid import Axis, Grid
from supervisor.config.pools import PoolSection, grid
from supervisor.engines.kinds import read_cluster
from tests.rig.pools import PAIRS, WHOLES
from tests.supervisor.config.test_load import Written


def test_pools_and_grids_are_read(written: Written) -> None:
    cluster = read_cluster(written(PAIRS))
    assert cluster.pool["quick"] == PoolSection(engines=("p0", "p1"), priority=2)
    assert cluster.pool["long"].priority == 0
    grids = cluster.model["tiny"].grid.by_leg
    assert list(grids) == ["prefill", "decode"]
    rows = (("quick", "cheap"), ("quick", "quick"))
    assert grid(grids["prefill"]) == Grid(Axis(0.0, 100.0, 2), Axis(10.0, 1010.0, 2), rows)
    assert grid(grids["decode"]) == Grid(Axis(0.0, 200.0, 2), Axis(5.0, 105.0, 1), (("short",), ("long",)))


def test_engines_of_both_legs_have_one_grid(written: Written) -> None:
    grids = read_cluster(written(WHOLES)).model["tiny"].grid.by_leg
    assert list(grids) == ["both"]
    assert grid(grids["both"]).pool(0, None) == "cheap"


@pytest.mark.parametrize("targets", [(None, None), (0, 12.5)])
def test_a_model_may_have_targets_of_its_own(written: Written, targets: tuple[float | None, float | None]) -> None:
    keys = ("ttft_target_ms", "itl_target_ms")
    lines = "".join(f"{key} = {value}\n" for key, value in zip(keys, targets, strict=True) if value is not None)
    model = read_cluster(written(PAIRS.replace("[model.tiny.grid.prefill]", f"{lines}[model.tiny.grid.prefill]", 1)))
    assert (model.model["tiny"].ttft_target_ms, model.model["tiny"].itl_target_ms) == targets
