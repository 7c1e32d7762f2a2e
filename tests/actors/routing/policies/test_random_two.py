"""The policy `random_two`."""

from __future__ import annotations

import random
from collections import Counter

from actors.routing.load import Load
from actors.routing.policies.random_two import RandomTwo
from tests.rig.router import Loads, generate


def test_the_better_of_two_different_workers_is_chosen() -> None:
    loads = [Load(f"w{place}", place, 10) for place in range(5)]
    policy = RandomTwo(random.Random(1).random)
    counts = Counter[str]()
    for _ in range(20_000):
        choice = policy(generate(), Loads(loads))
        assert choice is not None
        counts[choice.load.name] += 1
    # Of ten pairs the least loaded is in four, the next is the better one of three, and the last never is.
    expected = {"w0": 0.4, "w1": 0.3, "w2": 0.2, "w3": 0.1}
    assert set(counts) == set(expected)
    assert all(abs(counts[name] / 20_000 - share) < 0.02 for name, share in expected.items())


def test_one_with_memory_for_the_request_is_better() -> None:
    full, free = Load("full", 0, 4, kv_tokens=9, kv_tokens_max=9), Load("free", 3, 4)
    choice = RandomTwo(lambda: 0.0)(generate(), Loads([full, free]))
    assert choice is not None
    assert choice.load is free
