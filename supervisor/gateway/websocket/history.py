"""What one connection remembers: the latest response of each of its lanes, so that a later one can continue it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field, frozen

from protocol.text_messages import Turn

TURN_BYTES = 200  # of a turn, beside its text
UNBOUNDED = 2**63  # for a connection that shares with no other


@frozen
class Said:
    """A conversation up to and with one response; `size_bytes` is what it takes in memory, about."""

    id: str
    turns: tuple[Turn, ...]
    size_bytes: int

    @classmethod
    def after(cls, before: Said | None, response_id: str, *turns: Turn) -> Said:
        """Return the conversation that goes on from `before` with these turns."""
        size_bytes = sum(TURN_BYTES + turn.content.__sizeof__() for turn in turns)
        if before is None:
            return cls(response_id, turns, size_bytes)
        return cls(response_id, before.turns + turns, before.size_bytes + size_bytes)


@define(eq=False)
class ResponseHistories:
    """What all connections remember together, `bytes_max` at most: whoever has most of it forgets first."""

    bytes_max: Callable[[], int]
    size_bytes: int = 0
    _of: dict[str, dict[Memory, None]] = field(factory=dict)  # by owner

    def changed(self, memory: Memory, by: int) -> None:
        """Note that a connection remembers so many bytes more, or less, and make room for them."""
        memories = self._of.setdefault(memory.owner, {})
        memories[memory] = None
        self.size_bytes += by
        if not memory.size_bytes:
            del memories[memory]
            if not memories:
                del self._of[memory.owner]
        while by > 0 and self.size_bytes > self.bytes_max():
            self._halve(self._largest())

    def _halve(self, memory: Memory) -> None:
        """Let one forget until there is room, or half of it is left: to find the largest takes a look at them all."""
        kept_bytes = memory.size_bytes // 2
        while memory.size_bytes > kept_bytes and self.size_bytes > self.bytes_max():
            memory.forget_oldest()

    def _largest(self) -> Memory:
        """Return the largest memory of the owner that has most."""
        most = max(self._of.values(), key=lambda memories: sum(each.size_bytes for each in memories))
        return max(most, key=lambda memory: memory.size_bytes)


@define(eq=False)
class Memory:
    """One place a lane, `None` being the lane without a name; when it is full, what was said longest ago goes first."""

    bytes_max: int
    shared: ResponseHistories = field(factory=lambda: ResponseHistories(lambda: UNBOUNDED))
    owner: str = ""
    size_bytes: int = 0
    _latest: dict[str | None, Said] = field(factory=dict)  # in the order in which they were remembered

    def remember(self, lane: str | None, said: Said) -> None:
        """Note the latest response of a lane in place of the one before; one that is too big is not remembered."""
        self._forget(lane)
        if said.size_bytes > self.bytes_max:
            return
        self._latest[lane] = said
        self._grow(said.size_bytes)
        while self.size_bytes > self.bytes_max:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget what was said longest ago."""
        self._forget(next(iter(self._latest)))

    def clear(self) -> None:
        """Forget everything: the connection has ended."""
        while self._latest:
            self.forget_oldest()

    def find(self, response_id: str) -> Said | None:
        """Return the response of that id, whichever lane it is the latest of."""
        return next((said for said in self._latest.values() if said.id == response_id), None)

    def find_in(self, lane: str | None, response_id: str) -> Said | None:
        """Return the response of that id if it is the latest of this lane."""
        said = self._latest.get(lane)
        return said if said is not None and said.id == response_id else None

    def evict(self, lane: str | None, response_id: str | None) -> None:
        """Forget the response of that id if it is the latest of this lane."""
        if response_id is not None and self.find_in(lane, response_id) is not None:
            self._forget(lane)

    @property
    def lanes(self) -> frozenset[str | None]:
        """The lanes of which something is remembered."""
        return frozenset(self._latest)

    def _forget(self, lane: str | None) -> None:
        if (said := self._latest.pop(lane, None)) is not None:
            self._grow(-said.size_bytes)

    def _grow(self, by: int) -> None:
        self.size_bytes += by
        self.shared.changed(self, by)
