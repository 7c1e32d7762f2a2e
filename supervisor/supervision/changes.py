"""What changes seldom in a directory, counted: whoever derives something from it knows when that is out of date."""

from __future__ import annotations

from collections.abc import Callable

import trio
from attrs import define, field


@define(eq=False)
class Changes:
    """Wakes those who wait for a worker, a node or a link to come or go; never for one request's begin or end."""

    version: int = 0
    then: Callable[[], None] | None = None  # runs in the turn of each change
    _lot: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def unpark_all(self) -> None:
        """Count a change, and wake all who wait for one."""
        self.version += 1
        self._lot.unpark_all()
        if self.then is not None:
            self.then()

    async def park(self) -> None:
        """Wait for the next change."""
        await self._lot.park()
