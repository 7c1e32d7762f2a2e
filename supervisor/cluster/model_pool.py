"""The workers of one model, as its router sees them in the directory.

A worker can be asked while its engine is up and its node can be reached, answers, and does not drain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from attrs import define, field

from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.pairing import Pairing
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker

log = logging.getLogger(__name__)


@define(eq=False)
class ModelPool:
    """The workers of one model on all nodes."""

    directory: Directory
    model: str
    _unpaired: Mapping[str, str] = field(init=False, factory=dict)  # as logged last

    def workers(self) -> list[ClusterWorker]:
        """Return the workers that can be asked now."""
        return self.directory.workers(self.model)

    def watchable(self) -> list[ClusterWorker]:
        """Return the available workers that publish their blocks, on nodes that support it."""
        node = self.directory.node
        return [
            worker
            for worker in self.workers()
            if worker.leg in {Leg.BOTH, Leg.PREFILL}
            and (isinstance(worker, LocalWorker) or node(worker.node).state.watched)
        ]

    def encoders(self) -> list[ClusterWorker]:
        """Return the encoders that can be asked now."""
        return list(self.directory.ranked(self.model, Leg.ENCODE))

    def embedders(self) -> list[ClusterWorker]:
        """Return the embedders that can be asked now."""
        return list(self.directory.ranked(self.model, Leg.EMBED))

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of all workers by their names in the cluster, whether they can be asked or not."""
        return self.directory.legs(self.model)

    def pairing(self) -> Pairing:
        """Return the pairs among the workers that can be asked now."""
        return self.directory.derived(("pairing", self.model), self._pairing)

    def _pairing(self) -> Pairing:
        infos = ((worker, worker.info) for worker in self.workers())
        pairing = Pairing.of((worker.full_name, worker.leg, info.terms) for worker, info in infos if info is not None)
        for name, reason in pairing.unpaired.items():
            if self._unpaired.get(name) != reason:
                log.warning("an engine is not paired", extra={"engine": name, "reason": reason})
        self._unpaired = pairing.unpaired
        return pairing

    def lacking(self, adapter: Adapter) -> frozenset[str] | None:
        """Return the names of the workers without an adapter, None if no worker has it."""
        return self.directory.derived(("lacking", self.model, adapter), lambda: self._lacking(adapter))

    def _lacking(self, adapter: Adapter) -> frozenset[str] | None:
        offers = self.directory.offers_by_name(self.model)
        having = {name for name, offer in offers.items() if offer.engine and adapter in offer.engine.adapters}
        return frozenset(offers.keys() - having) if having else None

    def weights(self) -> str | None:
        """Return the digest of the weights that are served, None if unknown: a generation is resumed with no others."""
        return self.directory.models.served_weights.get(self.model)

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or has room, or until `wake`."""
        await self.directory.wait_capacity(self.model)

    async def wait_members_changed(self) -> None:
        """Wait until a worker, a node or a link has come or gone."""
        await self.directory.wait_changed()

    def wake(self) -> None:
        """Wake everybody in `wait_changed`: a reservation was released."""
        self.directory.notify_capacity(self.model)
