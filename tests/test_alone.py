"""One thing that goes wrong alone, and what honest clients beside it notice, for one seed after the other."""

from __future__ import annotations

import random

import pytest
import trio

from tests.sim import cluster_alone
from tests.sim.cluster_seed import ClusterRun
from tests.sim.seed import ALONE, Run, traced

SEEDS = 3  # of each; the seeds of the simulator draw more
CLUSTER_SEEDS = 9


@pytest.mark.parametrize(
    ("alone", "seed"),
    [
        *((alone, seed) for alone in ALONE for seed in range(SEEDS)),
        *((alone, seed) for alone in cluster_alone.ALONE for seed in range(CLUSTER_SEEDS)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_honest_clients_hardly_notice(alone, seed):
    async def whole_system(rng: random.Random) -> str:
        if alone in ALONE:
            return await Run(rng, only=alone).traced()
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=alone).traced()

    try:
        traced(whole_system, seed)
    except BaseException:
        print(f"seed {seed}: python -m pytest tests/test_alone.py -k '{alone.__name__} and {seed}'")  # noqa: T201  # pytest shows it
        raise
