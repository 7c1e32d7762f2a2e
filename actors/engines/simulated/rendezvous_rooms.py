"""Where simulated prefills wait for simulated decodes of the same process, as prefills do until a KV cache is taken."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field


@define(eq=False)
class RendezvousRooms:
    """The rooms in which decodes are to take a KV cache and have no slot or no memory for it yet.

    A decode of another process is in none of them, so nobody waits for it.
    """

    _awaited: dict[int, list[Callable[[], None]]] = field(factory=dict)  # whom to tell, by room

    def expect(self, room: int) -> None:
        """Note that a decode was asked to take a cache there."""
        self._awaited.setdefault(room, [])

    def take(self, room: int) -> None:
        """Note that it has room for the cache, or never will have, and tell whoever waits."""
        for tell in self._awaited.pop(room, ()):
            tell()

    def wait(self, room: int, tell: Callable[[], None]) -> bool:
        """Return whether a decode must be waited for there; then `tell` is called once it need not be."""
        if room not in self._awaited:
            return False
        self._awaited[room].append(tell)
        return True
