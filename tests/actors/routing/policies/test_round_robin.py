"""The policy `round_robin`."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.routing.load import Load
from actors.routing.policies.round_robin import RoundRobin
from protocol.messages.cluster import Leg
from tests.rig.router import Loads, generate


def chosen(policy: RoundRobin, loads: list[Load]) -> str:
    choice = policy(generate(), Loads(loads))
    assert choice is not None
    assert choice.on_taken is not None
    choice.on_taken()
    return choice.load.name


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 30))
def test_workers_take_turns_whatever_their_loads(busy: list[int], requests: int) -> None:
    loads = [Load(f"w{place}", each, 4) for place, each in enumerate(busy)]
    policy = RoundRobin()
    counts = Counter(chosen(policy, loads) for _ in range(requests))
    assert sum(counts.values()) == requests
    shares = [counts[load.name] for load in loads]
    assert max(shares) - min(shares) <= 1


def test_a_worker_that_is_no_candidate_loses_its_turn_and_no_other_does() -> None:
    a, b, c = (Load(name, 0, 1) for name in "abc")
    policy = RoundRobin()
    assert [chosen(policy, loads) for loads in ([a, b, c], [a, c], [a, b, c], [c, b, a])] == ["a", "c", "a", "b"]


def test_each_leg_has_turns_of_its_own() -> None:
    policy = RoundRobin()
    prefills, decodes = ([Load(f"{leg}{n}", 0, 1, leg=leg) for n in (0, 1)] for leg in (Leg.PREFILL, Leg.DECODE))
    order = [chosen(policy, loads) for _ in range(2) for loads in (prefills, decodes)]
    assert order == ["prefill0", "decode0", "prefill1", "decode1"]


def test_a_choice_that_comes_to_nothing_takes_no_turn() -> None:
    policy, loads = RoundRobin(), [Load("a", 0, 1), Load("b", 0, 1)]
    for _ in range(3):
        choice = policy(generate(), Loads(loads))
        assert choice is not None
        assert choice.load.name == "a"
    assert [chosen(policy, loads) for _ in range(3)] == ["a", "b", "a"]
