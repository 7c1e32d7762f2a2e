"""A budget of bytes shared first come, first served; without I/O, so that any event loop can wait for it.

The first waiter gets its whole share before any other, else small shares could starve a large one. A share is given
back once, by its holder; the next shares are taken in the same turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class ByteShare:
    """Bytes of a budget, which wait, are taken, and are given back in the end."""

    budget: ByteBudget
    size: int
    on_taken: Callable[[], None]  # called when a waiting share is taken; may neither wait nor raise
    taken: bool = False
    over: bool = False

    def give_back(self) -> None:
        """Give the bytes back, or stop waiting for them; idempotent."""
        if not self.over:
            self.over = True
            self.budget.give_back(self)


@define(eq=False)
class ByteBudget:
    """At most `bytes_max` bytes, taken in shares."""

    bytes_max: int
    taken_bytes: int = 0
    _waiting: deque[ByteShare] = field(factory=deque, init=False)

    @property
    def waiting(self) -> int:
        """The number of shares that wait."""
        return len(self._waiting)

    def fits(self, size: int) -> bool:
        """Return whether a share of `size` bytes would be taken at once."""
        return not self._waiting and self.taken_bytes + size <= self.bytes_max

    def share(self, size: int, on_taken: Callable[[], None]) -> ByteShare:
        """Return a share of `size` bytes, at most `bytes_max`, which is taken at once or waits for its turn."""
        assert size <= self.bytes_max, f"a share of {size} bytes would wait for ever"
        share = ByteShare(self, size, on_taken)
        if self.fits(size):
            share.taken = True
            self.taken_bytes += size
        else:
            self._waiting.append(share)
        return share

    def give_back(self, share: ByteShare) -> None:
        """Return the bytes of a share to the budget, and take the next waiting shares."""
        if share.taken:
            self.taken_bytes -= share.size
        else:
            self._waiting.remove(share)
        while self._waiting and self.taken_bytes + self._waiting[0].size <= self.bytes_max:
            following = self._waiting.popleft()
            following.taken = True
            self.taken_bytes += following.size
            following.on_taken()
