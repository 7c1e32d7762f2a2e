"""Each single fault under several seeds: it costs the clients beside it no more than is promised."""

from __future__ import annotations

import random

import pytest
import trio

from tests.system.simulator import cluster_seed
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.seed import SINGLE_FAULTS, Run, traced
from tests.system.simulator.single_fault import SingleFault

SEEDS = 3  # of each; the seeds of the simulator draw more
CLUSTER_SEEDS = 7


@pytest.mark.parametrize(
    ("single_fault", "seed"),
    [
        *((single_fault, seed) for single_fault in SINGLE_FAULTS for seed in range(SEEDS)),
        *((single_fault, seed) for single_fault in cluster_seed.SINGLE_FAULTS for seed in range(CLUSTER_SEEDS)),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_a_single_fault_costs_other_clients_no_more_than_is_promised(
    single_fault: type[SingleFault], seed: int
) -> None:
    async def whole_system(rng: random.Random) -> str:
        if single_fault in SINGLE_FAULTS:
            return await Run(rng, only=single_fault).traced()
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=single_fault).traced()

    try:
        traced(whole_system, seed)
    except BaseException:
        command = (
            f"python -m pytest tests/system/simulator/test_single_fault.py -k '{single_fault.__name__} and {seed}'"
        )
        print(f"seed {seed}: {command}")  # noqa: T201  # pytest shows it
        raise
