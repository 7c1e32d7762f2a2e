"""The history of one WebSocket: the latest response of each of its lanes, so that a later request can continue it.

Histories exist in memory only, and end with their connection. Each history is bounded, and so are all together. When
the total is reached, the owner (a client's key) with the largest histories loses its oldest conversations first, so no
client can push out the conversations of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attrs import define, field, frozen

from protocol.messages.text import Turn
from supervisor.gateway.memory_budgets import UNBOUNDED

TURN_BYTES = 200  # of a turn, beside its text
PART_BYTES = 200  # of a part of a turn or a call, beside its text or its URL, which may contain the whole image


@frozen
class Conversation:
    """A conversation up to and including one response; `size_bytes` estimates the memory that it takes."""

    id: str  # of the response
    turns: tuple[Turn, ...]
    size_bytes: int

    @classmethod
    def after(cls, previous: Conversation | None, response_id: str, *turns: Turn) -> Conversation:
        """Return the conversation that continues `previous` with these turns."""
        size_bytes = sum(map(_size_bytes, turns))
        if previous is None:
            return cls(response_id, turns, size_bytes)
        return cls(response_id, previous.turns + turns, previous.size_bytes + size_bytes)


def _size_bytes(turn: Turn) -> int:
    content, size_bytes = turn.content, TURN_BYTES
    if turn.reasoning:
        size_bytes += turn.reasoning.__sizeof__()
    for call in turn.calls:
        size_bytes += PART_BYTES + sum(text.__sizeof__() for text in (call.id, call.name, call.arguments))
    if isinstance(content, str):
        return size_bytes + content.__sizeof__()
    texts = (part if isinstance(part, str) else part.url for part in content)
    return size_bytes + sum(PART_BYTES + text.__sizeof__() for text in texts)


@frozen
class HistoryStatistics:
    """The memory that all histories take, in bytes."""

    size_bytes: int
    by_owner: Mapping[str, int]


@define(eq=False)
class ResponseHistories:
    """The histories of all connections, at most `bytes_max` together."""

    bytes_max: Callable[[], int]
    size_bytes: int = 0
    _by_owner: dict[str, dict[ResponseHistory, None]] = field(factory=dict)  # those that are not empty

    def statistics(self) -> HistoryStatistics:
        """Return the memory in use, in all and by owner."""
        by_owner = {owner: _total_bytes(histories) for owner, histories in self._by_owner.items()}
        return HistoryStatistics(self.size_bytes, by_owner)

    def resized(self, history: ResponseHistory, by: int) -> None:
        """Count a history that has grown by `by` bytes, or shrunk, and make room if it has grown."""
        histories = self._by_owner.setdefault(history.owner, {})
        histories[history] = None
        self.size_bytes += by
        if not history.size_bytes:
            del histories[history]
            if not histories:
                del self._by_owner[history.owner]
        while by > 0 and self.size_bytes > self.bytes_max():
            self._halve(self.largest())

    def _halve(self, history: ResponseHistory) -> None:
        """Shrink a history until there is room or half of it is left: finding the largest one scans all of them."""
        kept_bytes = history.size_bytes // 2
        while history.size_bytes > kept_bytes and self.size_bytes > self.bytes_max():
            history.forget_oldest()

    def largest(self) -> ResponseHistory:
        """Return the largest history of the owner whose histories take most."""
        histories = max(self._by_owner.values(), key=_total_bytes)
        return max(histories, key=lambda history: history.size_bytes)


def _total_bytes(histories: Iterable[ResponseHistory]) -> int:
    return sum(history.size_bytes for history in histories)


@define(eq=False)
class ResponseHistory:
    """The latest conversation of each lane; when it is full, the oldest is forgotten. The unnamed lane is None."""

    bytes_max: int
    shared: ResponseHistories = field(factory=lambda: ResponseHistories(lambda: UNBOUNDED))
    owner: str = ""
    size_bytes: int = 0
    _latest: dict[str | None, Conversation] = field(factory=dict)  # the oldest first

    def remember(self, lane: str | None, conversation: Conversation) -> None:
        """Keep a conversation as the latest of its lane, unless it alone is too large."""
        self._forget(lane)
        if conversation.size_bytes > self.bytes_max:
            return
        self._latest[lane] = conversation
        self._resize(conversation.size_bytes)
        while self.size_bytes > self.bytes_max:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the conversation that was added longest ago."""
        self._forget(next(iter(self._latest)))

    def clear(self) -> None:
        """Forget everything: the connection has ended."""
        while self._latest:
            self.forget_oldest()

    def find(self, response_id: str) -> Conversation | None:
        """Return the conversation that ends with this response, whichever lane it is the latest of."""
        return next((latest for latest in self._latest.values() if latest.id == response_id), None)

    def find_in(self, lane: str | None, response_id: str) -> Conversation | None:
        """Return the conversation that ends with this response if it is the latest of this lane."""
        conversation = self._latest.get(lane)
        return conversation if conversation is not None and conversation.id == response_id else None

    def evict(self, lane: str | None, response_id: str | None) -> None:
        """Forget the conversation that ends with this response if it is the latest of this lane."""
        if response_id is not None and self.find_in(lane, response_id) is not None:
            self._forget(lane)

    @property
    def lanes(self) -> frozenset[str | None]:
        """The lanes of which a conversation is kept."""
        return frozenset(self._latest)

    def _forget(self, lane: str | None) -> None:
        if (conversation := self._latest.pop(lane, None)) is not None:
            self._resize(-conversation.size_bytes)

    def _resize(self, by: int) -> None:
        self.size_bytes += by
        self.shared.resized(self, by)
