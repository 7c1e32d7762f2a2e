"""Routers with pools, in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from actors.routing.pools.grid import Axis, Grid
from actors.routing.pools.service_levels import LegPools, Names, ServiceLevels
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, RoutingHints
from tests.rig.router import Fake, Play, RouterRig, generate, prefill_info

PREFILLS: dict[str, Names] = {
    "p-quick": frozenset({"pq"}),
    "p-cheap": frozenset({"p1", "p2"}),
    "p-long": frozenset({"p3"}),
}
DECODES: dict[str, Names] = {"d-quick": frozenset({"d0"}), "d-cheap": frozenset({"d1"}), "d-long": frozenset({"d2"})}
TTFTS, ITLS = Axis(0, 1000, 2), Axis(0, 100, 2)


def pair_levels(ttft_ms: float | None = None, itl_ms: float | None = None) -> ServiceLevels:
    """Return pools of prefills and decodes: quick, cheap, and long for prompts of 50 and contexts of 100 tokens."""
    prefills = Grid(Axis(0, 100, 2), TTFTS, (("p-quick", "p-cheap"), ("p-long", "p-long")))
    decodes = Grid(Axis(0, 200, 2), ITLS, (("d-quick", "d-cheap"), ("d-long", "d-long")))
    return ServiceLevels(
        {
            Leg.PREFILL: LegPools(prefills, PREFILLS, {"p-quick": 9, "p-cheap": 0, "p-long": 5}, ttft_ms),
            Leg.DECODE: LegPools(decodes, DECODES, {"d-quick": 9, "d-cheap": 0, "d-long": 5}, itl_ms),
        }
    )


def pair_workers() -> list[Fake]:
    """Return a worker of every name in those pools."""
    prefills = [Fake(name, leg=Leg.PREFILL, info=prefill_info()) for name in ("pq", "p1", "p2", "p3")]
    return [*prefills, *(Fake(name, leg=Leg.DECODE) for name in ("d0", "d1", "d2"))]


def whole_levels(sizes: Mapping[str, int] = {}, /, **priorities: int) -> ServiceLevels:  # never changed
    """Return pools mapped by TTFT targets from 0, 1000, 2000 and so on, in their order.

    A pool has one worker of its own name, or as many as `sizes` says, with their numbers behind it.
    """
    names = tuple(priorities)
    grid = Grid(Axis(0, 100, 1), Axis(0, 1000 * len(names), len(names)), (names,))
    workers = {
        name: frozenset(f"{name}{number}" for number in range(sizes[name])) if name in sizes else frozenset({name})
        for name in names
    }
    return ServiceLevels({Leg.BOTH: LegPools(grid, workers, priorities)})


def aimed(name: str, ttft_ms: float | None, tokens_max: int = 6, prompt: Iterable[int] = (5, 6, 7, 8)) -> Generate:
    """Return a request with a TTFT target."""
    wanted = generate(name, tokens_max, prompt)
    return wanted if ttft_ms is None else evolve(wanted, hints=RoutingHints(ttft_target_ms=ttft_ms))


THREE = {"quick": 9, "middle": 5, "cheap": 1}


def three(**plays: list[Play]) -> list[Fake]:
    """Return a worker for each pool of `THREE`, with its script."""
    return [Fake(name, plays.get(name, [])) for name in THREE]


def asked(rig: RouterRig) -> dict[str, list[str]]:
    """Return the ids of the requests that each worker was asked for."""
    return {worker.name: [each.id for each in worker.asked] for worker in rig.pool.all if worker.asked}


def workers_of(rig: RouterRig) -> list[str]:
    """Return the names of the workers that were asked, in the order of their first requests."""
    return sorted(asked(rig), key=lambda name: rig.worker(name).times[0])
