"""What tests let a seed have besides what it draws, so that a few seeds have every fault.

Kinds are dealt in turn: whatever a seed draws, any twenty seeds of one node that follow each other have each fault of a
node, of pictures and of prefix caches, and any twelve of a cluster each fault and each shape. `python -m
tests.system.hunt --planned` deals in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from attrs import frozen

from protocol.messages.cluster import Leg
from tests.system.simulator.faults import CLUSTER_FAULTS, FAULTS
from tests.system.simulator.picture_faults import PICTURE_FAULTS, UNDER_A_TENSOR
from tests.system.simulator.prefix_plan import SPOILS

SHAPES = (  # the legs of the nodes beside the gateway's
    (Leg.BOTH,),
    (Leg.BOTH, Leg.BOTH),
    (Leg.PREFILL, Leg.DECODE),
    (Leg.PREFILL, Leg.DECODE, Leg.BOTH),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE),
    (Leg.PREFILL, Leg.DECODE, Leg.DECODE),
    (Leg.PREFILL, Leg.PREFILL, Leg.DECODE, Leg.DECODE),
)
ALL_LEGS = SHAPES[3]
RARELY_SEEN = ("drain", "trickles", "too many bugs", "half-open front", "jump", "stuck", "cut the front")
NODE_FAULTS = (*RARELY_SEEN, *(kind for kind in FAULTS if kind not in RARELY_SEEN))  # the first of them twice in twenty
UNRESUMED = {"too many bugs", "cut the front"}  # clients see such a loss only if nothing resumes
TIMES = 2  # of each fault, since the first may befall nothing that is busy
FRONT_ENDS = ("crash", "drain")  # of a cluster's gateway
ANY = TypeVar("ANY")


@frozen
class FaultPlan:
    """What happens in a run for certain, beside what its seed draws; it has no single fault."""

    faults: Sequence[str] = ()
    clients: int = 6  # at least
    picture_faults: Sequence[str] = ()
    spoils: str = ""
    tls: bool = False
    blind: bool = False  # clients send pictures to a model that takes none
    resumes: bool = True  # else a request that loses its worker ends
    legs: tuple[Leg, ...] = ()
    front_ends: str | None = None
    restarts: bool = False  # of the second gateway
    operated: bool | None = None  # operators have the engines carry out operations; None: as the seed draws

    @property
    def far(self) -> bool:
        """Whether the workers of one node must be behind a link."""
        return any("front" in kind for kind in self.faults)

    @property
    def injected(self) -> Sequence[str]:
        """The faults that befall something at a moment; the others are made of the run's limits and its end."""
        return [kind for kind in self.faults if kind not in {"trickles", "drain"}]


NO_PLAN = FaultPlan()


def deal(kinds: Sequence[ANY], turn: int) -> ANY:
    """Return the kind whose turn it is."""
    return kinds[turn % len(kinds)]


def plan_node(seed: int) -> FaultPlan:
    """Return what happens in a seed of one node."""
    return FaultPlan(
        faults=(deal(NODE_FAULTS, seed),),
        picture_faults=(deal(PICTURE_FAULTS, seed // 2),) if seed % 2 else (),
        spoils=deal(SPOILS, seed // 4) if seed % 4 == 3 else "",
        tls=seed % 4 == 1,
        blind=seed % 4 == 2,
        resumes=deal(NODE_FAULTS, seed) not in UNRESUMED,
        operated=seed % 3 == 0,
    )


def plan_cluster(seed: int) -> FaultPlan:
    """Return what happens in a seed of a cluster."""
    return FaultPlan(
        faults=(deal(CLUSTER_FAULTS, 2 * seed), deal(CLUSTER_FAULTS, 2 * seed + 1)),
        picture_faults=(deal(PICTURE_FAULTS, seed // 2), deal([*UNDER_A_TENSOR], seed // 2)) if seed % 2 else (),
        legs=deal(SHAPES, seed + 1),  # so that only pairs can answer where one of their legs dies
        front_ends=deal(FRONT_ENDS, seed // 4) if seed % 4 == 0 else None,
        operated=seed % 3 == 1,
    )


def plan_gateways(seed: int) -> FaultPlan:
    """Return what happens in a seed of a cluster with two gateways."""
    return FaultPlan(
        (deal(CLUSTER_FAULTS, seed),),
        clients=9,
        legs=ALL_LEGS if seed % 2 else (),
        restarts=seed % 2 == 0,
        operated=seed % 2 == 1,
    )
