"""The spans of one request in its router: each choice of workers, each call to one, and the hand-off between two.

A choice has the costs of the workers that the policy compared. A request that goes on elsewhere has a further choice
with the code of the loss, and the number of tokens sent before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, evolve

from actors.kit.spans import Attribute, Span, Spans, asking
from actors.routing.ports import Worker
from actors.routing.route import Chosen, Route
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from protocol.trace import Trace


@define(eq=False)
class RouteSpans:
    """The spans of one request in its router; nothing is recorded of a trace that is not sampled."""

    spans: Spans
    trace: Trace | None
    new_id: Callable[[], str]
    choices: int = 0
    _chosen_at: float = 0.0  # when the present choice began
    _first_leg_at: float | None = None  # when the first leg of the present pair began to answer

    def choosing(self) -> None:
        """Note that a choice begins."""
        self._chosen_at, self._first_leg_at = trio.current_time(), None

    def chosen(self, route: Route, *, lost: str = "", sent: int = 0) -> None:
        """Record a choice; a further one follows the loss of a worker, after `sent` tokens for the client."""
        if (trace := self.spans.child(self.trace)) is None:
            return
        self.choices += 1
        attributes: dict[str, Attribute] = {"espalier.worker": route.name, "espalier.route.choice": self.choices}
        if self.choices > 1:
            attributes |= {"espalier.lost": lost, "espalier.sent_tokens": sent}
        for part, chosen in (("decode", route.chosen), ("prefill", route.chosen_prefill)):
            if chosen is not None:
                attributes |= _costs(part, chosen)
        self.spans.record(Span(trace, "route", self._chosen_at, trio.current_time(), attributes))

    @contextmanager
    def leg(self, worker: Worker, request: Generate) -> Iterator[Generate]:
        """Yield the request for a worker, with a span of its own, and record how the call in the body ended."""
        name = "generate" if worker.leg is Leg.BOTH else worker.leg.value
        with asking(self.spans, self.trace, self.new_id, name, worker.full_name) as trace:
            yield request if trace is request.trace else evolve(request, trace=trace)

    def handed_over(self, route: Route) -> None:
        """Note that one leg of a pair has begun to answer; the hand-off is the time until the other has."""
        now, first_at = trio.current_time(), self._first_leg_at
        if first_at is None:
            self._first_leg_at = now
        elif (trace := self.spans.child(self.trace)) is not None:
            self.spans.record(Span(trace, "hand-off", first_at, now, {"espalier.worker": route.name}))


def _costs(part: str, chosen: Chosen) -> dict[str, Attribute]:
    """Return the workers that were compared for one leg, and their costs; the policy may have none."""
    compared = sorted(chosen.choice.compared, key=lambda each: each[1])
    return {
        f"espalier.route.{part}.workers": [name for name, _ in compared] or None,
        f"espalier.route.{part}.costs": [float(cost) for _, cost in compared] or None,
        f"espalier.route.{part}.overlap_tokens": chosen.choice.overlap or None,
    }
