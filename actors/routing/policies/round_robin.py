"""The policy `round_robin`: the workers in turn, at any load."""

from __future__ import annotations

from functools import partial

from attrs import define, field

from actors.routing.candidates import Candidates, Choice
from actors.routing.load import Load
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate


@define(eq=False)
class RoundRobin:
    """The turns of the workers of one model, each leg's apart."""

    _last: dict[Leg, str] = field(factory=dict)

    def __call__(self, _: Generate, candidates: Candidates, /) -> Choice | None:
        """Return the worker behind the last one, by name."""
        loads = list(candidates)
        if not loads:
            return None
        last = self._last.get(loads[0].leg, "")
        load = min(loads, key=lambda load: (load.name <= last, load.name))
        return Choice(load, on_taken=partial(self._take, load))

    def _take(self, load: Load) -> None:
        self._last[load.leg] = load.name
