"""The identity of models: a worker that has another model under the same name is not asked.

Where this node has the model's folder, the digests of its files decide. A node that routes need not have the weights;
then it compares the workers with each other. The weights of most available workers are served; between two with equally
many, the ones served before stay. A worker with other weights counts as down meanwhile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from attrs import define, evolve, field, frozen

from protocol.errors import PeerViolation
from protocol.messages.cluster import NodeState, Offer
from protocol.messages.engine import EngineInfo
from protocol.model_folder import WEIGHTS, Digest, is_well_formed, mismatch

log = logging.getLogger(__name__)

NOT_ASKED = "is not asked"

Refusal: TypeAlias = Callable[[EngineInfo], str | None]
"""Returns why an engine cannot be asked by this node, whatever its model; None if it can."""


def _refuse_none(_: EngineInfo) -> None:
    """Refuse no engine."""


@frozen
class ModelIdentityStatistics:
    """Counts of what is kept at one moment of other nodes' announcements."""

    nodes: int
    models: int


@define(eq=False)
class ModelIdentities:
    """The models of this node and of all others, and the workers that are left out because theirs differ."""

    digests: Mapping[str, Digest] = field(factory=dict)  # of this node's own folders, by the model's name
    refusal: Refusal = _refuse_none
    rejected: dict[str, dict[str, str]] = field(factory=dict)  # by node and worker, why it is not asked
    served_weights: dict[str, str] = field(factory=dict)  # by the model's name, the digest of the weights
    _states: dict[str, NodeState] = field(factory=dict)  # of the nodes whose workers have announced their weights
    _holders: defaultdict[str, dict[str, set[str]]] = field(factory=partial(defaultdict, dict))  # by model and weights
    _changed: set[str] = field(factory=set)  # the models whose served weights have changed since `reapply`

    def statistics(self) -> ModelIdentityStatistics:
        """Return how many nodes have announced weights, and of how many models."""
        return ModelIdentityStatistics(len(self._states), len(self._holders))

    def apply(self, node: str, state: NodeState) -> NodeState:
        """Return the state of a node in which each worker of another model is down, with the reason.

        Raises `PeerViolation` for digests that cannot be.
        """
        if any(offer.engine is not None and not is_well_formed(offer.engine.digest) for offer in state.offers):
            raise PeerViolation("a model's digest is longer than any")
        self._count(node, state)
        return self._without_foreign(node, state)

    def reapply(self) -> Iterator[tuple[str, NodeState]]:
        """Yield the nodes with a model whose served weights have changed, each with its state as `apply` returns it."""
        changed = set(self._changed)
        self._changed.clear()
        for node, state in tuple(self._states.items() if changed else ()):
            if any(offer.model in changed for offer in state.offers):
                yield node, self._without_foreign(node, state)

    def forget(self, node: str) -> None:
        """Forget what a node has announced."""
        self.rejected.pop(node, None)
        self._count(node, NodeState())

    @property
    def rejections(self) -> dict[str, str]:
        """Why workers are not asked, by name in the cluster, as the ends of sentences that begin with the names."""
        by_node = sorted(self.rejected.items())
        return {
            f"{node}/{name}": f"{NOT_ASKED}: {reason}"
            for node, reasons in by_node
            for name, reason in sorted(reasons.items())
        }

    def _without_foreign(self, node: str, state: NodeState) -> NodeState:
        before = self.rejected.pop(node, {})
        rejected = {offer.name: reason for offer in state.offers if (reason := self._foreign(offer)) is not None}
        if rejected:
            self.rejected[node] = rejected
        for name, reason in rejected.items():
            if before.get(name) != reason:
                log.warning("a worker is not asked", extra={"peer": node, "engine": name, "reason": reason})
        return evolve(state, offers=tuple(_rejected(offer, rejected.get(offer.name)) for offer in state.offers))

    def _foreign(self, offer: Offer) -> str | None:
        """Return why a worker is not asked: it has another model, or is refused; None if it is asked."""
        if offer.engine is None:
            return None
        if (reason := self.refusal(offer.engine)) is not None:
            return reason
        if (reason := mismatch(self.digests.get(offer.model, ()), offer.engine.digest)) is not None:
            return reason
        weights, served = self._weights(offer), self.served_weights.get(offer.model)
        if weights is None or weights == served or served is None:
            return None
        holders = self._holders.get(offer.model, {}).get(served) or {"those that were asked last"}
        return f"its model is another one: its weights are not those of {min(holders)}"

    def _weights(self, offer: Offer) -> str | None:
        """Return the digest of a worker's weights, None if it has announced none or this node has its own."""
        own = dict(self.digests.get(offer.model, ()))
        if offer.engine is None or WEIGHTS in own:
            return None
        return dict(offer.engine.digest).get(WEIGHTS)

    def _count(self, node: str, state: NodeState) -> None:
        """Count the weights of a node's available workers, in place of its earlier ones."""
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
            self._choose_weights(model)

    def _release(self, name: str, model: str, weights: str) -> None:
        holders = self._holders[model].get(weights, set())
        holders.discard(name)
        if not holders:
            self._holders[model].pop(weights, None)

    def _choose_weights(self, model: str) -> None:
        """Serve the weights of most workers; while none is available, the weights served last."""
        before, holders = self.served_weights.get(model), self._holders.get(model, {})
        if not holders:
            self._holders.pop(model, None)
            if not self._is_named(model):
                self.served_weights.pop(model, None)
                self._changed.discard(model)
            return
        chosen = max(holders, key=lambda weights: (len(holders[weights]), weights == before), default=before)
        if chosen is not None and chosen != before:
            self.served_weights[model] = chosen
            self._changed.add(model)
            if before is not None:
                extra = {"model": model, "workers": len(holders[chosen])}
                log.warning("other weights of a model are asked from now on", extra=extra)

    def _is_named(self, model: str) -> bool:
        """Whether a model is this node's own, or some node announces it: other names are not kept."""
        return model in self.digests or any(
            offer.model == model for state in self._states.values() for offer in state.offers
        )


def _rejected(offer: Offer, reason: str | None) -> Offer:
    """Return an offer as of an engine that has never been ready: its limits are not this model's."""
    return offer if reason is None else evolve(offer, up=False, engine=None, why=f"{NOT_ASKED}: {reason}")
