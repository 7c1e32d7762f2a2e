"""Memory that all clients share: what the gateway keeps for them together, whatever each connection may have by itself.

Limits of one connection bound nothing when there are a thousand of them. A budget is taken as the bytes come (a
`content-length` is a promise), and it is never waited for, so that nobody can hold one part and wait for another. One
key holds at most a share of it, or one thing that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attrs import define, field

from protocol.errors import Overloaded


@define(eq=False)
class MemoryBudget:
    """Bytes of one kind; `bytes_max` says how many there are now, `share_max` how much of them one owner may hold."""

    what: str  # as an error names it
    bytes_max: Callable[[], int]
    share_max: Callable[[], float]
    reserved_bytes: int = 0
    _of: dict[str, int] = field(factory=dict)  # by owner

    def hold(self, owner: str | None, free_bytes: int = 0) -> MemoryReservation:
        """Return what one request will hold, nothing yet; None owns nothing by name, and so has no share of its own.

        The first `free_bytes` are not counted: small requests are heard when the budget is used up.
        """
        return MemoryReservation(self, owner, free_bytes)

    @contextmanager
    def holding(self, owner: str | None, free_bytes: int = 0) -> Iterator[MemoryReservation]:
        """Release at the end of the body what was taken in it."""
        held = self.hold(owner, free_bytes)
        try:
            yield held
        finally:
            held.release()

    def take(self, owner: str | None, size: int) -> None:
        """Take so many bytes, or raise `Overloaded` and take none."""
        most = self.bytes_max()
        if self.reserved_bytes + size > most:
            raise Overloaded(f"{self.reserved_bytes} of {most} bytes of {self.what} are in use")
        if owner is not None:
            before = self._of.get(owner, 0)
            own = before + size
            if before and own > self.share_max() * most:
                raise Overloaded(
                    f"the key {owner!r} has its share (key_share_max) of the {most} bytes of {self.what} in use"
                )
            self._of[owner] = own
        self.reserved_bytes += size

    def give(self, owner: str | None, size: int) -> None:
        """Give back what was taken."""
        self.reserved_bytes -= size
        if owner is not None:
            self._of[owner] -= size
            if not self._of[owner]:
                del self._of[owner]


@define(eq=False)
class MemoryReservation:
    """What one request, or one connection, holds of a budget."""

    budget: MemoryBudget
    owner: str | None
    free_bytes: int
    size_bytes: int = 0  # in all, what is free included

    def grow(self, size: int) -> None:
        """Take so many bytes more; raises `Overloaded`, and then holds what it held."""
        if (more := self._counted(self.size_bytes + size) - self._counted(self.size_bytes)) > 0:
            self.budget.take(self.owner, more)
        self.size_bytes += size

    def shrink(self, size: int) -> None:
        """Give back so many bytes of what it holds."""
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
