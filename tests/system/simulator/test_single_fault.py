"""Each single fault: it costs the clients beside it no more than is promised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from tests.system.simulator import cluster_seed
from tests.system.simulator.cluster_seed import ClusterRun
from tests.system.simulator.seed import SINGLE_FAULTS, Run, traced
from tests.system.simulator.single_fault import SingleFault

SEED = {"SlowReaders": 2}  # the seed that shows most of a fault; 1 of all others
SEEDS = {True: range(4), False: range(7)}  # of a node, and of a cluster: some planted bugs show in one seed of several


def cases() -> Iterator[Any]:
    """Yield each fault under its seed and, for the night, under more seeds."""
    for single_fault in (*SINGLE_FAULTS, *cluster_seed.SINGLE_FAULTS):
        for seed in SEEDS[single_fault in SINGLE_FAULTS]:
            by_day = seed == SEED.get(single_fault.__name__, 1)
            marks = () if by_day else pytest.mark.nightly
            yield pytest.param(single_fault, seed, id=f"{single_fault.__name__}-{seed}", marks=marks)


@pytest.mark.parametrize(("single_fault", "seed"), [*cases()])
def test_a_single_fault_costs_other_clients_no_more_than_is_promised(
    single_fault: type[SingleFault], seed: int
) -> None:
    async def whole_system(rng: random.Random) -> str:
        if single_fault in SINGLE_FAULTS:
            return await Run(rng, only=single_fault).traced()
        async with trio.open_nursery() as nursery:
            return await ClusterRun(rng, nursery=nursery, only=single_fault).traced()

    traced(whole_system, seed)
