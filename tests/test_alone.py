"""One thing that goes wrong alone, and what honest clients beside it notice, for one seed after the other."""

from __future__ import annotations

import random

import pytest

from tests.sim.seed import ALONE, Run, traced

SEEDS = 3  # of each; the seeds of the simulator draw more


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("alone", ALONE, ids=lambda each: each.__name__)
def test_honest_clients_hardly_notice(alone, seed):
    async def whole_system(rng: random.Random) -> str:
        return await Run(rng, only=alone).traced()

    try:
        traced(whole_system, seed)
    except BaseException:
        print(f"seed {seed}: python -m pytest tests/test_alone.py -k '{alone.__name__} and {seed}'")  # noqa: T201  # pytest shows it
        raise
