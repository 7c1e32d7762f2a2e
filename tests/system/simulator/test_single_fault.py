"""Each single fault: it costs the clients beside it no more than is promised."""

from __future__ import annotations

import random

import pytest
import trio

from tests.system.simulator import cluster_seed
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.seed import SINGLE_FAULTS, Run, traced
from tests.system.simulator.single_fault import SingleFault

SEED = 1  # of each; the seeds of the simulator draw more


@pytest.mark.parametrize(
    "single_fault", [*SINGLE_FAULTS, *cluster_seed.SINGLE_FAULTS], ids=lambda single_fault: single_fault.__name__
)
def test_a_single_fault_costs_other_clients_no_more_than_is_promised(single_fault: type[SingleFault]) -> None:
    async def whole_system(rng: random.Random) -> str:
        if single_fault in SINGLE_FAULTS:
            return await Run(rng, only=single_fault).traced()
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=single_fault).traced()

    traced(whole_system, SEED)
