"""The rooms in which simulated prefills wait for decodes of the same process, as real ones wait for a transfer."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class RendezvousRooms:
    """The rooms of decodes that have no slot or no memory for their KV cache yet.

    A decode of another process is in none of them, so that no prefill waits for it.
    """

    _awaited: dict[int, list[Callable[[], None]]] = field(factory=dict)  # callbacks of prefills, by room

    def expect(self, room: int) -> None:
        """Note that a decode is to accept a KV cache in this room."""
        self._awaited.setdefault(room, [])

    def accept(self, room: int) -> None:
        """Record the decode's acceptance of the KV cache, or its end, and call the waiting prefills."""
        for notify in self._awaited.pop(room, ()):
            notify()

    def wait(self, room: int, notify: Callable[[], None]) -> bool:
        """Return whether a prefill must wait in this room; then `notify` is called when it need not any more."""
        if room not in self._awaited:
            return False
        self._awaited[room].append(notify)
        return True
