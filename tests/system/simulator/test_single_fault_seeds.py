"""Each single fault under more seeds than `make test` has time for: some planted bugs show in one seed of several."""

from __future__ import annotations

import random

import pytest
import trio

from tests.system.simulator import cluster_seed
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.seed import SINGLE_FAULTS, Run, traced
from tests.system.simulator.single_fault import SingleFault

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("single_fault", SINGLE_FAULTS, ids=lambda single_fault: single_fault.__name__)
def test_a_single_fault_of_a_node_costs_no_more_than_is_promised(single_fault: type[SingleFault], seed: int) -> None:
    async def node(rng: random.Random) -> str:
        return await Run(rng, only=single_fault).traced()

    traced(node, seed)


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("single_fault", cluster_seed.SINGLE_FAULTS, ids=lambda single_fault: single_fault.__name__)
def test_a_single_fault_of_a_cluster_costs_no_more_than_is_promised(single_fault: type[SingleFault], seed: int) -> None:
    async def cluster(rng: random.Random) -> str:
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=single_fault).traced()

    traced(cluster, seed)
