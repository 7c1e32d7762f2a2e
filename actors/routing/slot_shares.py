"""The slots of one model's workers that the requests of each owner have, as far as one router has chosen them.

A generation holds its slot until it ends, so an owner with many long ones could hold all slots for minutes. One owner
leaves `kept` slots to the others: its next request waits for a slot of its own, while requests of others pass. All of
the model's slots count together, in the pool of a request if there are pools.

The slots of other routers' requests may be this owner's too: with several routers, each keeps as many, and slots that
other routers use count as taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from attrs import define, field

from actors.kit.shares import BudgetLimits, Obstacle
from actors.routing.ports import Worker


def keep_none() -> int:
    """Return the slots to keep where there is one owner alone."""
    return 0


@define(eq=False)
class SlotShares:
    """The requests of each owner, by the name of the worker that computes the answer."""

    kept: Callable[[], int]  # slots that one owner leaves to others
    _owned: dict[str, Counter[str]] = field(factory=dict)
    _refused: set[str] = field(factory=set)  # owners with requests that wait for a slot of their own

    def statistics(self) -> dict[str, int]:
        """Return the number of requests of each owner."""
        return {owner: owned.total() for owner, owned in self._owned.items()}

    def take(self, owner: str, worker: str) -> None:
        """Count a request of an owner at a worker."""
        self._owned.setdefault(owner, Counter())[worker] += 1

    def give_back(self, owner: str, worker: str) -> bool:
        """Stop counting a request; return whether another request of its owner may have waited for that."""
        owned = self._owned[owner]
        owned[worker] -= 1
        if not owned[worker]:
            del owned[worker]
        if not owned:
            del self._owned[owner]
        waited = owner in self._refused
        self._refused.discard(owner)
        return waited

    def allows(self, owner: str, workers: Iterable[Worker], in_scope: Callable[[str], bool] | None = None) -> bool:
        """Whether an owner may have one more slot of these workers, which are those in scope.

        Only as many workers are looked at as have slots enough.
        """
        if not (kept := self.kept()) or (owned := self._owned.get(owner)) is None:
            return True
        own = sum(count for name, count in owned.items() if in_scope is None or in_scope(name))
        if not own:
            return True
        slots = 0
        for worker in workers:
            load = worker.load
            slots += load.slots if load.routers == 1 else load.slots - max(0, load.busy - load.own)
            limits = BudgetLimits.of_slots(slots, kept * load.routers)
            if limits.obstacle(1, owned=own) is not Obstacle.OWNER:
                return True
        self._refused.add(owner)
        return False
