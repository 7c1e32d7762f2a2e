"""Requests that have not begun at an overcommitted worker move to one where they can begin at once.

A choice of a worker is a guess: loads change, and other routers choose at the same time. A wrong one would keep a
request waiting while another worker is idle. Moving is safe only before the first token, and a request must never be at
two workers at once; so a move cancels the current attempt, which only then is followed by the next.

Two routers can each have one leg of a pair while the other leg waits for that of the other router. Neither would ever
begin, so a request of a pair leaves its workers even if there are no others, and waits for them anew. Routers do so one
after the other, by their places, or two of them would leave and meet again at the same time.
"""

from __future__ import annotations

from typing import Protocol

import trio
from attrs import define, field

from actors.routing.route import Route
from actors.routing.routing import Routing
from actors.routing.service_levels import GroupKey
from protocol.cost import generation_tokens
from protocol.messages import Generate

VAIN_MAX = 8  # requests of one group in a round


class Movable(Protocol):
    """A request that was given to a worker."""

    @property
    def route(self) -> Route:
        """The route by which the request is answered now."""

    @property
    def remaining(self) -> Generate:
        """The request, with what was sent at the end of its prompt."""

    @property
    def avoided(self) -> set[str]:
        """The names of the workers that it must not move to."""

    @property
    def moves(self) -> int:
        """The number of its moves."""

    def move(self, route: Route | None) -> None:
        """Cancel it where it is, and then give it to `route`; None: to whichever it gets then."""


@define(eq=False)
class UnstartedRequests:
    """The requests that have not begun, in the order in which they were given to their workers."""

    _since: dict[Movable, float] = field(factory=dict)
    _added: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def add(self, request: Movable) -> None:
        """Add a request that was given to a worker just now."""
        self._since[request] = trio.current_time()
        self._added.unpark()

    def discard(self, request: Movable) -> None:
        """Remove a request that has begun, or has ended."""
        self._since.pop(request, None)

    async def move_on(self, routing: Routing) -> None:
        """Move requests that wait for `move_after_s`, then twice as long each time, `moves_max` times; until cancelled.

        A round chooses a worker for each request that moves, and `VAIN_MAX` times in vain for the same pools, however
        many wait: after one for which there is no room only smaller ones are tried.
        """
        while True:
            while not self._since:
                await self._added.park()
            await trio.sleep(routing.limits.move_after_s)
            self._move(routing)

    def _move(self, routing: Routing) -> None:
        """Make a round; it is a function of its own, so that no request is referred to between two rounds."""
        limits, now = routing.limits, trio.current_time()
        vain: dict[GroupKey, list[int]] = {}  # the tokens of those for which there was no room
        for request, since in tuple(self._since.items()):
            stays = now < since + limits.move_after_s * 2**request.moves or request.moves >= limits.moves_max
            if stays or not request.route.overcommitted:
                continue
            remaining = request.remaining
            tokens, others = generation_tokens(remaining), vain.setdefault(routing.levels.group(remaining), [])
            if others and (len(others) >= VAIN_MAX or tokens >= others[-1]):
                continue
            route = routing.choose_idle(remaining, request.avoided)
            if route is not None or _gives_way(request, now - since, limits.move_after_s):
                self.discard(request)
                request.move(route)
            if route is None:
                others.append(tokens)


def _gives_way(request: Movable, waited_s: float, move_after_s: float) -> bool:
    """Whether a request of a pair leaves its workers to requests of other routers, which may wait for it."""
    load = request.route.decode.load
    return (
        request.route.prefill is not None
        and load.routers > 1
        and waited_s >= move_after_s * 2**request.moves * (1 + load.place)
    )
