"""The workers of one model as its router sees them: those that can be asked now, the least busy first.

A worker can be asked while its engine is up and its node can be reached, answers, and does not drain. The order is kept
instead of being made for each request, since a cluster may have thousands of workers: a changed load moves one of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from attrs import define, field

from actors.routing.least_loaded import rank
from actors.routing.ports import Worker
from protocol.cluster import Leg
from supervisor.cluster.model_identity import ModelIdentities

Key: TypeAlias = tuple[bool, float, int, str]


@define(eq=False)
class RankedWorkers:
    """Workers in the order in which a router prefers them; one that changes is moved by a binary search."""

    _keys: dict[str, Key] = field(factory=dict)
    _order: list[Key] = field(factory=list)
    _workers: dict[str, Worker] = field(factory=dict)

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> RankedWorkers:
        """Return these workers in order."""
        ranked = cls()
        for worker in workers:
            key = _key(worker)
            ranked._keys[key[3]], ranked._workers[key[3]] = key, worker
        ranked._order = sorted(ranked._keys.values())
        return ranked

    def __len__(self) -> int:
        """How many workers there are."""
        return len(self._order)

    def __iter__(self) -> Iterator[Worker]:
        """Yield those with room first, the least busy, then with less to compute, then the first by name."""
        for *_, name in self._order:
            yield self._workers[name]

    def move(self, worker: Worker) -> None:
        """Move a worker whose load has changed to its place; one that is not among these stays out."""
        key = _key(worker)
        before = self._keys.get(key[3])
        if before is None or before == key:
            return
        del self._order[bisect_left(self._order, before)]
        insort(self._order, key)
        self._keys[key[3]] = key


def _key(worker: Worker) -> Key:
    load = worker.load
    return load.full, *rank(load)


class PoolDirectory(Protocol):
    """What a pool needs of a directory."""

    models: ModelIdentities

    def ranked(self, model: str, leg: Leg) -> RankedWorkers:
        """Return the workers of a model and a leg that can be asked now."""

    def workers(self, model: str) -> list[Worker]:
        """Return the workers of a model that can be asked now."""

    def legs(self, model: str) -> Mapping[str, Leg]:
        """Return the legs of all workers of a model by their names in the cluster, whether they can be asked or not."""

    async def wait_capacity(self, model: str) -> None:
        """Wait until a worker of a model comes, goes or has capacity, or until `notify_capacity`."""

    def notify_capacity(self, model: str) -> None:
        """Wake everybody in `wait_capacity`."""


@define(eq=False)
class WorkerPool:
    """The workers of one model on all nodes."""

    directory: PoolDirectory
    model: str

    def workers(self) -> list[Worker]:
        """Return the workers that can be asked now."""
        return self.directory.workers(self.model)

    def ranked(self, leg: Leg) -> RankedWorkers:
        """Return the workers of one leg that can be asked now, the least busy first."""
        return self.directory.ranked(self.model, leg)

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of all workers by their names in the cluster, whether they can be asked or not."""
        return self.directory.legs(self.model)

    def weights(self) -> str | None:
        """Return the digest of the weights that are served, None if unknown: a generation is resumed with no others."""
        return self.directory.models.served_weights.get(self.model)

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or has room, or until `wake`."""
        await self.directory.wait_capacity(self.model)

    def wake(self) -> None:
        """Wake everybody in `wait_changed`: a reservation was released."""
        self.directory.notify_capacity(self.model)
