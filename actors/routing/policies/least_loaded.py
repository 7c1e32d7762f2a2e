"""The policy `least_loaded`: the worker that has most of its slots free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from actors.routing.candidates import COMPARED_MAX, Candidates, Choice
from actors.routing.load import Load
from protocol.messages.generation import Generate

Rank: TypeAlias = tuple[float, int, str]


def least_loaded(request: Generate, candidates: Candidates) -> Choice | None:
    """Return the worker to ask.

    Workers with room in their KV memory come first, then the largest share of free slots, then the least to compute;
    the same loads always give the same one.
    """
    loads = candidates.leading(request)
    if not loads:
        return None
    return of_least_load(request, loads)


def of_least_load(request: Generate, loads: Sequence[Load]) -> Choice:
    """Return the choice of the best of some workers; their costs are their shares of busy slots."""
    best = min(loads, key=lambda load: (not load.fits(request), rank(load)))
    return Choice(best, compared=tuple([(load.name, load.busy / load.slots) for load in loads[:COMPARED_MAX]]))


def rank(load: Load) -> Rank:
    """Return a worker's rank in the order of this policy, for any request; the lowest is preferred."""
    return load.busy / load.slots, load.tokens, load.name
