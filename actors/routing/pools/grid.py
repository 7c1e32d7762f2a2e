"""The mapping of a request to a pool of workers, by how long it is and how fast its client wants it.

An operator divides two ranges into equal cells, lengths in tokens and targets in milliseconds, and names a pool for
each pair of cells. So each pool can be tuned for its share of the requests: another batch size, another number of
workers. Pools have priorities, and one of a higher priority is faster: it may stand in for a slower one.

Pure, and total: every length and every target has a pool, since values beyond a range count as its ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Axis:
    """One range from `low` to `high`, with `resolution` cells of equal size; `low` is below `high`."""

    low: float
    high: float
    resolution: int

    @property
    def midpoint(self) -> float:
        """The value in the middle of the range."""
        return (self.low + self.high) / 2

    @property
    def step(self) -> float:
        """The size of a cell."""
        return (self.high - self.low) / self.resolution

    def cell(self, value: float) -> int:
        """Return the number of the cell of a value, from 0; a cell contains its lower end."""
        if value <= self.low:
            return 0
        if value >= self.high:
            return self.resolution - 1
        return max(0, min(int((value - self.low) / self.step), self.resolution - 1))  # rounding may exceed the last


@frozen
class Grid:
    """The pool of every pair of cells: `pools` has a row for each cell of lengths, a column for each of targets."""

    lengths: Axis  # in tokens
    targets: Axis  # in milliseconds
    pools: tuple[tuple[str, ...], ...]

    def pool(self, length: int, target_ms: float | None) -> str:
        """Return the name of the pool of a request; without a target, the pool of the midpoint of the targets."""
        target_ms = self.targets.midpoint if target_ms is None else target_ms
        return self.pools[self.lengths.cell(length)][self.targets.cell(target_ms)]


def pools_to_try(pool: str, priorities: Mapping[str, int]) -> tuple[str, ...]:
    """Return a pool, and behind it all faster ones, the slowest of these first; equals keep their order.

    `priorities` has all pools that may stand in for each other. Pools as fast as the first are left out.
    """
    faster = [name for name, priority in priorities.items() if priority > priorities[pool]]
    return (pool, *sorted(faster, key=lambda name: priorities[name]))
