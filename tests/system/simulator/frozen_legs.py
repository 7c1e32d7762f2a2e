"""Idle engines of a cluster that freeze, each of one leg."""

from __future__ import annotations

import random

from attrs import define

from tests.rig.small_system import SmallSystem
from tests.system.simulator.canaries import TOKENS_MAX, FrozenEngine, draw_live_canary
from tests.system.simulator.cluster import OfCluster
from tests.system.simulator.cluster_single_fault import TWO_OF_ALL, shape
from tests.system.simulator.single_fault import SOON_S


@define(eq=False)
class FrozenLeg(OfCluster, FrozenEngine):
    """The same of an engine of any leg, on another node than the gateway."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng, TWO_OF_ALL) | {"canary": draw_live_canary(rng)}

    def choose(self) -> tuple[SmallSystem, int]:
        node_slot = self.rng.choice(self.cluster.node_slots)
        assert node_slot.life is not None
        self.note("at", node_slot.name)
        return node_slot.life, 0

    @property
    def answered_s(self) -> float:
        slowest = max(slot.costs.step_s + slot.costs.release_s for slot in self.cluster.node_slots)
        return (TOKENS_MAX + 4) * slowest + self.cluster.plan.rooms.transfer_s + SOON_S
