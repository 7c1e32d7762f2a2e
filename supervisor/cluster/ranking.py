"""The workers of one model and leg that can be asked now, the least busy first.

The order is kept instead of being made for each request, since a cluster may have thousands of workers: a changed load
moves one of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeAlias, TypeVar

from attrs import define, field

from actors.routing.load import Load
from actors.routing.policies.least_loaded import rank

RankKey: TypeAlias = tuple[bool, float, int, str]


class Rankable(Protocol):
    """A worker, as far as its place depends on it."""

    @property
    def full_name(self) -> str:
        """The name of its load."""

    @property
    def load(self) -> Load:
        """Its load at this moment."""


W = TypeVar("W", bound=Rankable)


@define(eq=False)
class SortedRanking(Generic[W]):
    """Workers in the order in which a router prefers them; one that changes is moved by a binary search."""

    _keys: dict[str, RankKey] = field(factory=dict)
    _order: list[RankKey] = field(factory=list)
    _workers: dict[str, W] = field(factory=dict)

    @classmethod
    def of(cls, workers: Sequence[W]) -> SortedRanking[W]:
        """Return these workers in order."""
        ranked = cls()
        for worker in workers:
            key = _key(worker)
            ranked._keys[key[3]], ranked._workers[key[3]] = key, worker
        ranked._order = sorted(ranked._keys.values())
        return ranked

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._order)

    def __iter__(self) -> Iterator[W]:
        """Yield those with room first, the least busy, then with less to compute, then the first by name."""
        for *_, name in self._order:
            yield self._workers[name]

    def get(self, name: str) -> W | None:
        """Return the worker of a name, None if it is not among these."""
        return self._workers.get(name)

    def move(self, worker: W) -> None:
        """Move a worker whose load has changed to its place; one that is not among these stays out."""
        if (before := self._keys.get(worker.full_name)) is None:
            return
        key = _key(worker)
        if before == key:
            return
        del self._order[bisect_left(self._order, before)]
        insort(self._order, key)
        self._keys[key[3]] = key


def _key(worker: Rankable) -> RankKey:
    load = worker.load
    return load.full, *rank(load)
