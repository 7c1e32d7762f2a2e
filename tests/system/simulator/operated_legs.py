"""Engines of a cluster that carry out operations, each of one leg or of both."""

from __future__ import annotations

import random

from attrs import define

from actors.routing.route import FailoverLimits
from tests.system.simulator.cluster import OfCluster
from tests.system.simulator.cluster_single_fault import shape
from tests.system.simulator.fault_plan import SHAPES
from tests.system.simulator.operated_engines import OperatedEngines


@define(eq=False)
class OperatedLegs(OfCluster, OperatedEngines):
    """The same of engines of any leg, on other nodes than the gateway."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng, SHAPES) | {"operated": True, "route": FailoverLimits()}
