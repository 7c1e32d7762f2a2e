"""Budgets of memory that all clients share, beside the limits of each connection.

Limits of one connection bound nothing when there are a thousand of them. So all memory for clients is reserved in a
shared budget. It is reserved as the bytes come, because a `content-length` is only a promise. A reservation never
waits: two requests could each hold a part and wait for the rest for ever. One key can reserve at most its part of a
budget (`actors/kit/shares.py`), and the first bytes of each reservation are free: this is the room of small requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf

from attrs import define, field, frozen

from actors.kit.shares import BudgetLimits, Obstacle, owner_part
from protocol.errors import Overloaded, TooLarge

UNBOUNDED = 2**63  # for a client that shares with no other


@frozen
class MemoryBudgetStatistics:
    """The bytes that are reserved of a budget; a reservation without an owner counts in the total alone."""

    reserved_bytes: int
    by_owner: Mapping[str, int]


@define(eq=False)
class MemoryBudget:
    """Memory for one purpose: `bytes_max` in all, of which one owner may reserve the fraction `share_max`.

    Both are functions: tests replace the limits of a running gateway. An owner of None is bounded by the total alone.
    """

    name: str  # as an error names it
    bytes_max: Callable[[], int]
    share_max: Callable[[], float]
    reserved_bytes: int = 0
    _by_owner: dict[str, int] = field(factory=dict)

    def statistics(self) -> MemoryBudgetStatistics:
        """Return how much is reserved, in all and by owner."""
        return MemoryBudgetStatistics(self.reserved_bytes, dict(self._by_owner))

    def reserve(self, owner: str | None, free_bytes: int = 0) -> MemoryReservation:
        """Return a reservation of no bytes yet; one without an owner is bounded by no share.

        The first `free_bytes` are not counted, so that small requests are read when the budget is used up.
        """
        return MemoryReservation(self, owner, free_bytes)

    @contextmanager
    def reserving(self, owner: str | None, free_bytes: int = 0) -> Iterator[MemoryReservation]:
        """Open a reservation for the body of a `with` statement, and release it at the end."""
        reservation = self.reserve(owner, free_bytes)
        try:
            yield reservation
        finally:
            reservation.release()

    def limits(self, owner: str | None) -> BudgetLimits:
        """Return the limits of the reservations of an owner."""
        bytes_max = self.bytes_max()
        return BudgetLimits(bytes_max, inf if owner is None else owner_part(bytes_max, self.share_max()))

    def request_max(self, owner: str | None) -> int:
        """Return the most bytes that one reservation may have, beside its free ones."""
        return self.limits(owner).call_max

    def take(self, owner: str | None, size: int, own: int) -> None:
        """Take `size` bytes for a reservation that has `own` already.

        Raises `Overloaded`, or `TooLarge` if the reservation could never fit; then no bytes are taken.
        """
        limits, owned = self.limits(owner), 0 if owner is None else self._by_owner.get(owner, 0)
        if limits.never_fits(own + size):
            raise TooLarge(f"one request can have {limits.call_max} of the {limits.total} bytes of {self.name}")
        obstacle = limits.obstacle(size, taken=self.reserved_bytes, owned=owned)
        if obstacle is Obstacle.OWNER:
            raise Overloaded(f"the key {owner!r} has its share of the {limits.total} bytes of {self.name} in use")
        if obstacle is not None:
            raise Overloaded(f"{self.reserved_bytes} of {limits.total} bytes of {self.name} are in use")
        if owner is not None:
            self._by_owner[owner] = owned + size
        self.reserved_bytes += size

    def give(self, owner: str | None, size: int) -> None:
        """Give back `size` bytes that were taken."""
        self.reserved_bytes -= size
        if owner is not None:
            self._by_owner[owner] -= size
            if not self._by_owner[owner]:
                del self._by_owner[owner]


@define(eq=False)
class MemoryReservation:
    """The part of a budget that one request, or one connection, has reserved."""

    budget: MemoryBudget
    owner: str | None
    free_bytes: int
    size_bytes: int = 0  # in all, the free bytes included

    def grow(self, size: int) -> None:
        """Reserve `size` bytes more; raises `Overloaded` or `TooLarge`, and then nothing has changed."""
        own = self._counted(self.size_bytes)
        if (more := self._counted(self.size_bytes + size) - own) > 0:
            self.budget.take(self.owner, more, own)
        self.size_bytes += size

    def shrink(self, size: int) -> None:
        """Give back `size` bytes of what is reserved."""
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


@define(eq=False)
class Backlogs:
    """The backlogs of all clients: beyond half of `bytes_max` each client may have its share of the other half.

    So a client with a short backlog is served even when other clients have used up the first half.
    """

    bytes_max: Callable[[], int]
    size_bytes: int = 0
    count: int = 0  # clients that have a backlog

    def allows(self, own: int, more: int) -> bool:
        """Whether a client with a backlog of `own` bytes may have `more` on top of them."""
        half = self.bytes_max() // 2
        return self.size_bytes + more <= half or own + more <= half // max(1, self.count)
