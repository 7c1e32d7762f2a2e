"""Single faults under one seed after the other, and what clients beside them notice."""

from __future__ import annotations

import random

import pytest
import trio

from tests.system.simulator import cluster_single_fault
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.seed import ALONE, Run, traced
from tests.system.simulator.single_fault import SingleFault

SEEDS = 3  # of each; the seeds of the simulator draw more
CLUSTER_SEEDS = 9


@pytest.mark.parametrize(
    ("alone", "seed"),
    [
        *((alone, seed) for alone in ALONE for seed in range(SEEDS)),
        *((alone, seed) for alone in cluster_single_fault.ALONE for seed in range(CLUSTER_SEEDS)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_honest_clients_hardly_notice(alone: type[SingleFault], seed: int) -> None:
    async def whole_system(rng: random.Random) -> str:
        if alone in ALONE:
            return await Run(rng, only=alone).traced()
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=alone).traced()

    try:
        traced(whole_system, seed)
    except BaseException:
        command = f"python -m pytest tests/system/simulator/test_single_fault.py -k '{alone.__name__} and {seed}'"
        print(f"seed {seed}: {command}")  # noqa: T201  # pytest shows it
        raise
