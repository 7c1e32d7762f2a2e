"""The policy `least_loaded`: the worker that has most of its slots free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from actors.routing.load import Load
from protocol.messages import Generate

Rank: TypeAlias = tuple[float, int, str]


def least_loaded(request: Generate, loads: Sequence[Load]) -> int:
    """Return the place of the worker to ask.

    Those whose KV memory has room come first, then those with the largest share of slots free, then those with the
    least to compute; the same loads always give the same one.
    """

    def order(place: int) -> tuple[bool, Rank]:
        load = loads[place]
        return not load.fits(request), rank(load)

    return min(range(len(loads)), key=order)


def rank(load: Load) -> Rank:
    """Return where a worker stands in the order of this policy whatever the request is, the preferred one first."""
    return load.busy / load.slots, load.tokens, load.name
