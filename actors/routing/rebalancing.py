"""Requests that wait in vain at a worker with too much move to one where they can begin at once."""

from __future__ import annotations

from typing import Protocol

import trio
from attrs import define, field

from actors.routing.route import Route, Routing
from protocol.messages import Generate


class Movable(Protocol):
    """A request that has been given to a worker."""

    @property
    def route(self) -> Route:
        """Where it is."""

    @property
    def remaining(self) -> Generate:
        """The request as it stands."""

    @property
    def avoided(self) -> set[str]:
        """The names of the workers that it is not to move to."""

    @property
    def moves(self) -> int:
        """How often it has moved."""

    def move(self, route: Route) -> None:
        """Take it back from where it is, and give it to somebody else: never to both at once."""


@define(eq=False)
class UnstartedRequests:
    """The requests that have not begun where they are, the oldest first."""

    _since: dict[Movable, float] = field(factory=dict)
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def add(self, request: Movable) -> None:
        """Note that a request has just been given to a worker."""
        self._since[request] = trio.current_time()
        self._news.unpark()

    def discard(self, request: Movable) -> None:
        """Note that it has begun, or is not asked any more."""
        self._since.pop(request, None)

    async def move_on(self, routing: Routing) -> None:
        """Move for ever what has waited too long: `move_after_s`, and each time twice as long, `moves_max` times.

        A look costs one choice more than there are requests that move, however many wait.
        """
        while True:
            while not self._since:
                await self._news.park()
            limits = routing.limits
            await trio.sleep(limits.move_after_s)
            now = trio.current_time()
            for request, since in tuple(self._since.items()):
                patient = now < since + limits.move_after_s * 2**request.moves or request.moves >= limits.moves_max
                if patient or not request.route.overcommitted:
                    continue
                route = routing.choose_idle(request.remaining, request.avoided)
                if route is None:
                    break
                self.discard(request)
                request.move(route)
