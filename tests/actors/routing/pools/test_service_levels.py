"""The pools that a request is mapped to, and those that may stand in."""

from __future__ import annotations

import pytest

from actors.routing.pools.service_levels import ServiceLevels
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, RoutingHints, Sampling
from protocol.token_ids import TokenIds
from tests.rig.routed_pools import DECODES, PREFILLS, pair_levels


def request(
    prompt: int, ttft_ms: float | None = None, itl_ms: float | None = None, resumed_tokens: int = 0
) -> Generate:
    hints = None if ttft_ms is None and itl_ms is None else RoutingHints(ttft_target_ms=ttft_ms, itl_target_ms=itl_ms)
    return Generate("a", TokenIds.of([1] * prompt), Sampling(3), hints=hints, resumed_tokens=resumed_tokens)


@pytest.mark.parametrize(
    ("wanted", "pools"),
    [
        (request(0, 0, 0), ("p-quick", "d-quick")),
        (request(0, 0, None), ("p-quick", "d-cheap")),
        (request(0), ("p-cheap", "d-cheap")),  # the midpoints of both
        (request(49, 499.9, 49.9), ("p-quick", "d-quick")),
        (request(49, 500, 50), ("p-cheap", "d-cheap")),
        (request(50, 0, 0), ("p-long", "d-quick")),  # the contexts of decodes are divided at 100
        (request(99, 9e5, 0), ("p-long", "d-quick")),
        (request(100, 9e5, 0), ("p-long", "d-long")),
        (request(100, 9e5, 0, resumed_tokens=60), ("p-long", "d-long")),  # what was sent is a part of the prompt
    ],
)
def test_each_leg_is_mapped_by_its_own_grid(wanted: Generate, pools: tuple[str, str]) -> None:
    assert pair_levels().group(wanted) == pools


def test_the_target_of_the_model_is_for_requests_without_one() -> None:
    levels = pair_levels(ttft_ms=0.0, itl_ms=0.0)
    assert levels.group(request(0)) == ("p-quick", "d-quick")
    assert levels.group(request(0, 600)) == ("p-cheap", "d-quick")
    assert levels.group(request(0, None, 60)) == ("p-quick", "d-cheap")


def test_faster_pools_follow_the_mapped_one() -> None:
    levels = pair_levels()
    assert levels.order(Leg.PREFILL, request(0)) == (PREFILLS["p-cheap"], PREFILLS["p-long"], PREFILLS["p-quick"])
    assert levels.order(Leg.PREFILL, request(99)) == (PREFILLS["p-long"], PREFILLS["p-quick"])
    assert levels.order(Leg.DECODE, request(0, None, 0)) == (DECODES["d-quick"],)


def test_a_leg_in_another_pool_than_its_own_is_a_diversion() -> None:
    levels = pair_levels()
    legs = {Leg.PREFILL: "pq", Leg.DECODE: "d1"}
    assert levels.diversions(request(0, 0), legs) == []
    assert levels.diversions(request(0), legs) == [("p-cheap", "p-quick")]
    assert levels.diversions(request(0, 0), {Leg.PREFILL: "new", Leg.DECODE: "d0"}) == [
        ("p-quick", ""),
        ("d-cheap", "d-quick"),
    ]
    assert levels.diversions(request(0), {Leg.BOTH: "whole"}) == []


def test_without_grids_all_requests_are_of_one_group() -> None:
    assert ServiceLevels().group(request(0)) == ServiceLevels().group(request(99, 0, 0)) == ()
