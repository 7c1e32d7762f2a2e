"""`--check` shows which requests each pool gets."""

from __future__ import annotations

from supervisor.engines.kinds import read_cluster
from supervisor.node import preview
from supervisor.node.preview import pool_lines
from tests.rig.pools import PAIRS, WHOLES
from tests.supervisor.config.test_load import Written


def test_each_grid_is_shown_with_its_pools(written: Written) -> None:
    assert pool_lines(read_cluster(written(PAIRS))) == [
        "pools of tiny for prefill: quick of priority 2 with p0, p1; cheap of priority 0 with p2",
        "  input 0 to 50, ttft: quick for 10 to 510 ms, cheap for 510 to 1010 ms",
        "  input 50 to 100, ttft: quick for 10 to 1010 ms",
        "pools of tiny for decode: short of priority 1 with d0; long of priority 0 with d1",
        "  context 0 to 100, itl: short for 5 to 105 ms",
        "  context 100 to 200, itl: long for 5 to 105 ms",
    ]


def test_an_engine_that_no_pool_has_is_named(written: Written) -> None:
    cluster = read_cluster(written(WHOLES))
    assert pool_lines(cluster)[0].endswith("cheap of priority 0 with w1; in no pool: w2")
    assert "\n" + "\n".join(pool_lines(cluster)) + "\n" in preview.describe_node(cluster, "main", {})
