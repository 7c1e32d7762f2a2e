"""Memory that all clients share, whatever limits each connection has by itself.

Limits of one connection bound nothing when there are a thousand of them. So what the gateway keeps for clients is
reserved in a budget that all share: as the bytes come, because a `content-length` is only a promise, and never by
waiting, because two requests that each hold a part and wait for the rest would wait for ever. One key can reserve at
most a share of a budget, or one reservation that is larger than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from attrs import define, field, frozen

from protocol.errors import Overloaded


@frozen
class BudgetStatistics:
    """What is reserved of a budget, in bytes; a reservation without an owner counts in the total alone."""

    reserved_bytes: int
    by_owner: Mapping[str, int]


@define(eq=False)
class MemoryBudget:
    """Bytes of one kind: `bytes_max` in all, of which one owner may reserve the fraction `share_max`.

    Both are functions, so that a reload of the configuration changes them.
    """

    name: str  # as an error names it
    bytes_max: Callable[[], int]
    share_max: Callable[[], float]
    reserved_bytes: int = 0
    _by_owner: dict[str, int] = field(factory=dict)

    def statistics(self) -> BudgetStatistics:
        """Return how much is reserved, in all and by owner."""
        return BudgetStatistics(self.reserved_bytes, dict(self._by_owner))

    def reserve(self, owner: str | None, free_bytes: int = 0) -> MemoryReservation:
        """Return a reservation of nothing yet; None is no owner, and no share bounds it.

        The first `free_bytes` are not counted, so that small requests are read when the budget is used up.
        """
        return MemoryReservation(self, owner, free_bytes)

    @contextmanager
    def reserving(self, owner: str | None, free_bytes: int = 0) -> Iterator[MemoryReservation]:
        """Give the body a reservation, and release it at the end of the body."""
        reservation = self.reserve(owner, free_bytes)
        try:
            yield reservation
        finally:
            reservation.release()

    def take(self, owner: str | None, size: int) -> None:
        """Take so many bytes, or raise `Overloaded` and take none."""
        bytes_max = self.bytes_max()
        if self.reserved_bytes + size > bytes_max:
            raise Overloaded(f"{self.reserved_bytes} of {bytes_max} bytes of {self.name} are in use")
        if owner is not None:
            before = self._by_owner.get(owner, 0)
            after = before + size
            if before and after > self.share_max() * bytes_max:
                raise Overloaded(
                    f"the key {owner!r} has its share (key_share_max) of the {bytes_max} bytes of {self.name} in use"
                )
            self._by_owner[owner] = after
        self.reserved_bytes += size

    def give(self, owner: str | None, size: int) -> None:
        """Give back what was taken."""
        self.reserved_bytes -= size
        if owner is not None:
            self._by_owner[owner] -= size
            if not self._by_owner[owner]:
                del self._by_owner[owner]


@define(eq=False)
class MemoryReservation:
    """What one request, or one connection, has reserved of a budget."""

    budget: MemoryBudget
    owner: str | None
    free_bytes: int
    size_bytes: int = 0  # in all, the free bytes included

    def grow(self, size: int) -> None:
        """Reserve so many bytes more; raises `Overloaded`, and then nothing has changed."""
        if (more := self._counted(self.size_bytes + size) - self._counted(self.size_bytes)) > 0:
            self.budget.take(self.owner, more)
        self.size_bytes += size

    def shrink(self, size: int) -> None:
        """Give back so many bytes of what is reserved."""
        if (less := self._counted(self.size_bytes) - self._counted(self.size_bytes - size)) > 0:
            self.budget.give(self.owner, less)
        self.size_bytes -= size

    def release(self) -> None:
        """Give everything back; idempotent."""
        if counted := self._counted(self.size_bytes):
            self.budget.give(self.owner, counted)
        self.size_bytes = 0

    def _counted(self, size: int) -> int:
        return max(0, size - self.free_bytes)
