"""The worker with the largest share of its slots free; of equals the one with less to compute."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen


@frozen
class Load:
    """How busy a worker is: requests that it has, of as many as it runs at once, and the tokens that they hold.

    No two workers of one pool have the same `name`.
    """

    name: str
    busy: int
    slots: int
    tokens: int = 0

    @property
    def full(self) -> bool:
        """Whether one more would have to wait."""
        return self.busy >= self.slots


def least_loaded(loads: Sequence[Load]) -> int | None:
    """Return the place of the worker to ask, None if all are full; the same loads always give the same one."""
    free = [at for at, load in enumerate(loads) if not load.full]
    return min(free, key=lambda at: (loads[at].busy / loads[at].slots, loads[at].tokens, loads[at].name), default=None)
