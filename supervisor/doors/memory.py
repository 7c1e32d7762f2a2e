"""What one connection remembers: the latest response of each of its lanes, so that a later one can continue it."""

from __future__ import annotations

from attrs import define, field, frozen

from protocol.messages import Turn

TURN_BYTES = 200  # of a turn, beside its text


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
class Memory:
    """One place a lane, `None` being the lane without a name; when it is full, what was said longest ago goes first."""

    bytes_max: int
    size_bytes: int = 0
    _latest: dict[str | None, Said] = field(factory=dict)  # in the order in which they were remembered

    def remember(self, lane: str | None, said: Said) -> None:
        """Note the latest response of a lane in place of the one before; one that is too big is not remembered."""
        self._forget(lane)
        if said.size_bytes > self.bytes_max:
            return
        self._latest[lane] = said
        self.size_bytes += said.size_bytes
        while self.size_bytes > self.bytes_max:
            self._forget(next(iter(self._latest)))

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
            self.size_bytes -= said.size_bytes
