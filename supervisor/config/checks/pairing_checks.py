"""Validation of the prefills and decodes of a model beside each other: each leg can meet one of the other."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from protocol.pairing import Pairing
from protocol.strict.mistakes import Mistake, join, segment
from supervisor.config.schema import Cluster

PAIRED = frozenset({Leg.PREFILL.value, Leg.DECODE.value})


def mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Yield the legs of pairs that can meet no other: where one is found, the prefills alone are named.

    In a cluster that nodes of other files join, a leg may meet another one there. An order in which a kind has no pairs
    is a mistake in every cluster.
    """
    yield from _orders(cluster)
    if cluster.cluster.join:
        return
    for model in dict.fromkeys(engine.model for engine in cluster.engine.values()):
        of_model = ((name, engine) for name, engine in cluster.engine.items() if engine.model == model)
        pairs = ((name, Leg(engine.leg), engine.hand_off_terms) for name, engine in of_model if engine.leg in PAIRED)
        unpaired = Pairing.of(pairs).unpaired
        prefills = {name: why for name, why in unpaired.items() if Leg(cluster.engine[name].leg) is Leg.PREFILL}
        for name, why in (prefills or unpaired).items():
            yield Mistake(join("engine", segment(name)), why)


def _orders(cluster: Cluster) -> Iterator[Mistake]:
    """Yield each model with an order of its legs in which the pairs of one of its engines are never asked."""
    for model, section in cluster.model.items():
        legs = ((name, each) for name, each in cluster.engine.items() if each.model == model and each.leg in PAIRED)
        for name, engine in legs:
            if section.hand_off is not None and HandOff(section.hand_off) not in engine.hand_offs:
                orders = " or ".join(each.value for each in engine.hand_offs)
                why = f"pairs of kind {engine.kind} are {orders} alone, and engine {name} is of that kind"
                yield Mistake(join(join("model", segment(model)), "hand_off"), why)
                break
