"""One thing that goes wrong alone, and what honest clients beside it notice, for one seed after the other."""

from __future__ import annotations

import random

import pytest
import trio

from tests.sim import cluster_alone
from tests.sim.cluster_seed import ClusterRun
from tests.sim.seed import ALONE, Run, traced

SEEDS = 3  # of each; the seeds of the simulator draw more


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("alone", [*ALONE, *cluster_alone.ALONE], ids=lambda each: each.__name__)
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
