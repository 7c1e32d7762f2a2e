"""The models of this node, as their folders are here: a worker of another model under the same name is not asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from attrs import define, evolve, field

from protocol.cluster import NodeState, Offer
from protocol.errors import PeerViolation
from protocol.model_folder import Digest, mismatch, possible

log = logging.getLogger(__name__)

NOT_ASKED = "is not asked"


@define(eq=False)
class OwnModels:
    """Compares what other nodes' engines tell of their models' folders with this node's own."""

    digests: Mapping[str, Digest] = field(factory=dict)  # by the model's name
    refused: dict[str, dict[str, str]] = field(factory=dict)  # of each node its workers that are not asked, and why

    def judged(self, node: str, state: NodeState) -> NodeState:
        """Return what a node tells with each worker of another model as one that is down, which says why.

        Raises `PeerViolation` for digests that cannot be.
        """
        if any(offer.engine is not None and not possible(offer.engine.digest) for offer in state.offers):
            raise PeerViolation("a model's digest is longer than any")
        before = self.refused.pop(node, {})
        refused = {offer.name: why for offer in state.offers if (why := self._foreign(offer)) is not None}
        if refused:
            self.refused[node] = refused
        for name, why in refused.items():
            if before.get(name) != why:
                log.warning("a worker is not asked", extra={"peer": node, "engine": name, "reason": why})
        return evolve(state, offers=tuple(self._down(offer, refused.get(offer.name)) for offer in state.offers))

    def _foreign(self, offer: Offer) -> str | None:
        if offer.engine is None:
            return None
        return mismatch(self.digests.get(offer.model, ()), offer.engine.digest)

    def _down(self, offer: Offer, why: str | None) -> Offer:
        """Return an offer as of an engine that has never been ready: its limits are not this model's."""
        return offer if why is None else evolve(offer, up=False, engine=None, why=f"{NOT_ASKED}: {why}")

    def forget(self, node: str) -> None:
        """Forget what a node has told."""
        self.refused.pop(node, None)

    @property
    def whys(self) -> dict[str, str]:
        """How the workers are that are not asked, as the end of a sentence that begins with the name in the cluster."""
        every = sorted(self.refused.items())
        return {f"{node}/{name}": f"{NOT_ASKED}: {why}" for node, each in every for name, why in sorted(each.items())}
