"""The policy `random_two`: of two workers drawn at random, the one that has more of its slots free.

Routers without each other's latest choices do not all choose the same worker by it (Mitzenmacher, "The power of two
choices in randomized load balancing", 2001).
"""

from __future__ import annotations

from attrs import frozen

from actors.routing.candidates import Candidates, Chance, Choice
from actors.routing.policies.least_loaded import of_least_load
from protocol.messages.generation import Generate


@frozen
class RandomTwo:
    """The policy with its source of chance."""

    chance: Chance

    def __call__(self, request: Generate, candidates: Candidates, /) -> Choice | None:
        """Return the better of two; one with room for the request in its KV memory is better than one without."""
        loads = list(candidates)
        if not loads:
            return None
        first = int(self.chance() * len(loads))
        second = int(self.chance() * (len(loads) - 1))
        second += second >= first  # another one, if there is one
        drawn = [loads[first], loads[min(second, len(loads) - 1)]]
        return of_least_load(request, drawn)
