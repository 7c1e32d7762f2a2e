"""The workers of one model as its router sees them: those that can be asked, the least busy first."""

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
        """How many there are."""
        return len(self._order)

    def __iter__(self) -> Iterator[Worker]:
        """Yield those with room first, the least busy, then with less to compute, then the first by name."""
        for *_, name in self._order:
            yield self._workers[name]

    def move(self, worker: Worker) -> None:
        """Note that a worker is more or less busy; one that is not among these stays out."""
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
        """Return the legs of all workers of a model that are known, by their names in the cluster."""

    async def wait_capacity(self, model: str) -> None:
        """Wait until a worker of a model comes, goes or has capacity, or until `notify_capacity`."""

    def notify_capacity(self, model: str) -> None:
        """Wake everybody in `wait_capacity`."""


@define(eq=False)
class WorkerPool:
    """The workers of one model, here and there."""

    directory: PoolDirectory
    model: str

    def workers(self) -> list[Worker]:
        """Return those that can be asked now."""
        return self.directory.workers(self.model)

    def ranked(self, leg: Leg) -> RankedWorkers:
        """Return those of one leg, the least busy first."""
        return self.directory.ranked(self.model, leg)

    def expected(self) -> Mapping[str, Leg]:
        """Return the legs of all that are known, by their names: also of those that cannot be asked at the moment."""
        return self.directory.legs(self.model)

    def weights(self) -> str | None:
        """Return which weights are served, None if that is not known: an answer goes on with no others."""
        return self.directory.models.served_weights.get(self.model)

    async def wait_changed(self) -> None:
        """Wait until a worker has come, gone, or has room, or until `wake`."""
        await self.directory.wait_capacity(self.model)

    def wake(self) -> None:
        """End the waiting of all in `wait_changed`: a place that was kept at a worker is kept no longer."""
        self.directory.notify_capacity(self.model)
