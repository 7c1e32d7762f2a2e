"""Observers that count the events of actors in the metrics of a node.

Actors do not import metrics, and metrics do not import actors: each actor defines the class of its observer, and the
subclasses here connect the two.
"""

from __future__ import annotations

from attrs import define, frozen

from actors.engines.slots import SlotObserver
from actors.routing.ports import RoutingObserver
from supervisor.telemetry.metrics import Metrics


@define(eq=False)
class SlotMetrics(SlotObserver):
    """The metrics of one engine's slots."""

    metrics: Metrics
    engine: str

    def aborted(self, seconds: float) -> None:
        """Count how long a slot was kept after its request had been cancelled."""
        self.metrics.aborted(self.engine, seconds)

    def stuck(self, slots: int) -> None:
        """Set the number of slots that the engine has not released."""
        self.metrics.set_stuck_slots(self.engine, slots)


@frozen
class RoutingMetrics(RoutingObserver):
    """The metrics of one model's requests in its router."""

    metrics: Metrics
    model: str

    def call_ended(self, worker: str, outcome: str) -> None:
        """Count a call to a worker that has ended."""
        self.metrics.worker_called(self.model, worker, outcome)

    def call_resumed(self, code: str, sent: int) -> None:
        """Count a request that is resumed at another worker, after `sent` tokens were sent to its client."""
        self.metrics.worker_lost(self.model, code, "resumed" if sent else "retried")

    def call_not_resumed(self, code: str) -> None:
        """Count a request that ends because no other worker can resume it exactly."""
        self.metrics.worker_lost(self.model, code, "impossible")

    def worker_ejected(self, worker: str, code: str) -> None:
        """Count a worker, or a pair, that is ejected."""
        self.metrics.worker_ejected(self.model, worker, code)
