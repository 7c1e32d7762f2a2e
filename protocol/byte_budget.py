"""A number of bytes that many share, first come, first served; without I/O, so that any event loop can wait for it.

Whoever comes first waits for its whole share, and nobody overtakes it: else small shares could keep a large one waiting
for ever. A share is given back once, by whoever asked for it; the next ones are given theirs in the same turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class ByteShare:
    """Bytes of a budget: first they may wait, then they are taken, in the end they are given back."""

    budget: ByteBudget
    size: int
    on_taken: Callable[[], None]  # called when it has waited and is taken now; it may neither wait nor raise
    taken: bool = False
    over: bool = False

    def give_back(self) -> None:
        """Give the bytes back, or stop waiting for them; idempotent."""
        if not self.over:
            self.over = True
            self.budget.give_back(self)


@define(eq=False)
class ByteBudget:
    """Bytes of which at most `bytes_max` are taken at a time."""

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
        """Take back the bytes of a share that is over, and give those that wait theirs."""
        if share.taken:
            self.taken_bytes -= share.size
        else:
            self._waiting.remove(share)
        while self._waiting and self.taken_bytes + self._waiting[0].size <= self.bytes_max:
            following = self._waiting.popleft()
            following.taken = True
            self.taken_bytes += following.size
            following.on_taken()
