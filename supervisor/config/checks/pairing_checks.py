"""Validation of the prefills and decodes of a model beside each other: each leg can meet one of the other."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.messages.cluster import Leg
from protocol.pairing import Pairing
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the legs of pairs that can meet no other: where one is found, the prefills alone are named.

    In a cluster that nodes of other files join, a leg may meet another one there.
    """
    if cluster.cluster.join:
        return
    legs = {leg.value for leg in (Leg.PREFILL, Leg.DECODE)}
    for model in dict.fromkeys(engine.model for engine in cluster.engine.values()):
        of_model = ((name, engine) for name, engine in cluster.engine.items() if engine.model == model)
        pairs = ((name, Leg(engine.leg), engine.hand_off_terms) for name, engine in of_model if engine.leg in legs)
        unpaired = Pairing.of(pairs).unpaired
        prefills = {name: why for name, why in unpaired.items() if Leg(cluster.engine[name].leg) is Leg.PREFILL}
        for name, why in (prefills or unpaired).items():
            yield Mistake(join("engine", segment(name)), why)
