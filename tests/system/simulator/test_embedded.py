"""A model of vectors under a seed: every vector is its text's own, and nothing is left of any request."""

from __future__ import annotations

import pytest

from tests.system.hunt import Seeds
from tests.system.simulator.embedded import run_embedding_seed

SEEDS = 10  # `python -m tests.system.hunt --embeddings` runs more


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_vector_is_its_texts_and_nothing_is_left(seed: int) -> None:
    try:
        run_embedding_seed(seed)
    except BaseException:
        print(Seeds("embeddings").replay(seed))  # noqa: T201  # pytest shows it
        raise


def test_seeds_have_answers_losses_and_askers_that_leave() -> None:
    traces = "".join(map(run_embedding_seed, range(SEEDS)))
    for word in ("'ended'", "'left'", "'cut'", "'restart'", "'engine_refused'", "'deadline_exceeded'"):
        assert word in traces, word


def test_a_seed_decides_everything() -> None:
    again = run_embedding_seed.__wrapped__
    assert again(3) == run_embedding_seed(3)
