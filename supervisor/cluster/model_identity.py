"""The models of this node, as their folders are here: a worker of another model under the same name is not asked.

A node that routes need not have the weights. Then the workers are compared with each other: the weights stand that most
of those have who can be asked, of equally many those that stand already, and who has others is not asked meanwhile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

from attrs import define, evolve, field

from protocol.cluster import NodeState, Offer
from protocol.errors import PeerViolation
from protocol.model_folder import WEIGHTS, Digest, is_well_formed, mismatch

log = logging.getLogger(__name__)

NOT_ASKED = "is not asked"


@define(eq=False)
class ModelIdentities:
    """Compares what other nodes' engines tell of their models' folders with this node's own."""

    digests: Mapping[str, Digest] = field(factory=dict)  # by the model's name
    rejected: dict[str, dict[str, str]] = field(factory=dict)  # of each node its workers that are not asked, and why
    served_weights: dict[str, str] = field(
        factory=dict
    )  # by the model's name, the digest of the weights that are served
    _states: dict[str, NodeState] = field(factory=dict)  # of the nodes whose workers say which weights they have
    _holders: defaultdict[str, dict[str, set[str]]] = field(factory=partial(defaultdict, dict))  # by model and weights
    _changed: set[str] = field(factory=set)  # models of which other weights stand since the nodes were judged

    def judge(self, node: str, state: NodeState) -> NodeState:
        """Return what a node tells with each worker of another model as one that is down, which says why.

        Raises `PeerViolation` for digests that cannot be.
        """
        if any(offer.engine is not None and not is_well_formed(offer.engine.digest) for offer in state.offers):
            raise PeerViolation("a model's digest is longer than any")
        self._count(node, state)
        return self._judged(node, state)

    def reapply(self) -> Iterator[tuple[str, NodeState]]:
        """Yield how nodes are to be known from now on, as they told it last, since other weights stand now."""
        changed = set(self._changed)
        self._changed.clear()
        for node, state in tuple(self._states.items() if changed else ()):
            if any(offer.model in changed for offer in state.offers):
                yield node, self._judged(node, state)

    def _judged(self, node: str, state: NodeState) -> NodeState:
        before = self.rejected.pop(node, {})
        refused = {offer.name: why for offer in state.offers if (why := self._foreign(offer)) is not None}
        if refused:
            self.rejected[node] = refused
        for name, why in refused.items():
            if before.get(name) != why:
                log.warning("a worker is not asked", extra={"peer": node, "engine": name, "reason": why})
        return evolve(state, offers=tuple(self._down(offer, refused.get(offer.name)) for offer in state.offers))

    def _foreign(self, offer: Offer) -> str | None:
        if offer.engine is None:
            return None
        if (why := mismatch(self.digests.get(offer.model, ()), offer.engine.digest)) is not None:
            return why
        weights, standing = self._weights(offer), self.served_weights.get(offer.model)
        if weights is None or weights == standing or standing is None:
            return None
        holders = self._holders.get(offer.model, {}).get(standing) or {"those that were asked last"}
        return f"its model is another one: its weights are not those of {min(holders)}"

    def _weights(self, offer: Offer) -> str | None:
        """Return the digest of a worker's weights, if it says one and nothing here decides which is right."""
        own = dict(self.digests.get(offer.model, ()))
        if offer.engine is None or WEIGHTS in own:
            return None
        return dict(offer.engine.digest).get(WEIGHTS)

    def _count(self, node: str, state: NodeState) -> None:
        """Note who of a node has which weights, if it can be asked."""
        models = set()
        for offer in self._states.pop(node, NodeState()).offers:
            if (weights := self._weights(offer)) is not None:
                models.add(offer.model)
                self._release(f"{node}/{offer.name}", offer.model, weights)
        for offer in state.offers:
            if (weights := self._weights(offer)) is None:
                continue
            models.add(offer.model)
            self._states[node] = state
            own = self.digests.get(offer.model, ())
            if offer.up and not state.draining and mismatch(own, offer.engine.digest if offer.engine else ()) is None:
                self._holders[offer.model].setdefault(weights, set()).add(f"{node}/{offer.name}")
        for model in models:
            self._stand(model)

    def _release(self, name: str, model: str, weights: str) -> None:
        holders = self._holders[model].get(weights, set())
        holders.discard(name)
        if not holders:
            self._holders[model].pop(weights, None)

    def _stand(self, model: str) -> None:
        """Let the weights stand that most have; while nobody can be asked, those that stood last."""
        before, holders = self.served_weights.get(model), self._holders.get(model, {})
        if not holders:
            self._holders.pop(model, None)
            if not self._is_known(model):
                self.served_weights.pop(model, None)
                self._changed.discard(model)
            return
        now = max(holders, key=lambda each: (len(holders[each]), each == before), default=before)
        if now is not None and now != before:
            self.served_weights[model] = now
            self._changed.add(model)
            if before is not None:
                extra = {"model": model, "workers": len(holders[now])}
                log.warning("other weights of a model are asked from now on", extra=extra)

    def _is_known(self, model: str) -> bool:
        """Whether a model is this node's own, or a node tells of it: names that were heard once are not kept."""
        return model in self.digests or any(
            offer.model == model for state in self._states.values() for offer in state.offers
        )

    def _down(self, offer: Offer, why: str | None) -> Offer:
        """Return an offer as of an engine that has never been ready: its limits are not this model's."""
        return offer if why is None else evolve(offer, up=False, engine=None, why=f"{NOT_ASKED}: {why}")

    def forget(self, node: str) -> None:
        """Forget what a node has told."""
        self.rejected.pop(node, None)
        self._count(node, NodeState())

    @property
    def rejections(self) -> dict[str, str]:
        """How the workers are that are not asked, as the end of a sentence that begins with the name in the cluster."""
        every = sorted(self.rejected.items())
        return {f"{node}/{name}": f"{NOT_ASKED}: {why}" for node, each in every for name, why in sorted(each.items())}
