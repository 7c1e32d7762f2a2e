"""Requests that have not begun at an overcommitted worker move to one where they can begin at once.

A choice of a worker is a guess: loads change, and other routers choose at the same time. A wrong one would keep a
request waiting while another worker is idle. Moving is safe only before the first token, and a request must never be at
two workers at once; so a move cancels the current attempt, and begins the next one only then.

Two routers can each have one leg of a pair while the other leg waits for that of the other router. Neither would ever
begin, so a request of a pair leaves its workers even if there are no others, and waits for them anew. Routers do so one
after the other, by their places, or two of them would leave and meet again at the same time.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

import trio
from attrs import define, field

from actors.routing.pools.service_levels import GroupKey
from actors.routing.route import Route
from actors.routing.routing import Routing
from protocol.cost import generation_tokens
from protocol.messages.generation import Generate

LOOKS_MAX = 64  # requests looked at in one turn


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
        """The names of workers that it must not move to; an overcommitted one need not be among them."""

    @property
    def moves(self) -> int:
        """The number of its moves."""

    def move(self, route: Route | None) -> None:
        """Cancel it where it is, and then give it to `route`; None: to whichever it gets then."""


@define(eq=False)
class UnstartedRequests:
    """The requests that have not begun, in the order of their dispatch."""

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

        A round chooses a worker for each moving request; choices in vain are two at most for each set of workers, for
        any number of requests. Other tasks run after each choice, since a choice in vain may look at all workers.
        """
        while True:
            while not self._since:
                await self._added.park()
            await trio.sleep(routing.limits.move_after_s)
            await self._move(routing)

    async def _move(self, routing: Routing) -> None:  # noqa: ASYNC910  # its caller sleeps
        """Make a round; a function of its own, so that no request is referred to between two rounds."""
        limits, now = routing.limits, trio.current_time()
        stuck: dict[tuple[GroupKey, frozenset[str]], list[Movable]] = {}  # by the workers for a move
        for number, (request, since) in enumerate(tuple(self._since.items())):
            stays = now < since + limits.move_after_s * 2**request.moves or request.moves >= limits.moves_max
            if not stays and request.route.overcommitted:
                key = routing.levels.group(request.remaining), frozenset(request.avoided)
                stuck.setdefault(key, []).append(request)
            if number % LOOKS_MAX == LOOKS_MAX - 1:
                await trio.lowlevel.checkpoint()
        for requests in stuck.values():
            by_age = deque(requests)
            while by_age and await self._find_room(by_age[0], routing):
                by_age.popleft()
            # Where the oldest finds no memory, a smaller one may; if the smallest does not either, none does.
            by_size = deque(sorted(islice(by_age, 1, None), key=_tokens))
            while by_size and await self._find_room(by_size[0], routing):
                by_size.popleft()
            for request in (*islice(by_age, 1), *by_size):
                waits_since = self._since.get(request)
                if waits_since is not None and _gives_way(request, now - waits_since, limits.move_after_s):
                    self.discard(request)
                    request.move(None)

    async def _find_room(self, request: Movable, routing: Routing) -> bool:
        """Move a request to where it can begin at once; return False if it still waits, and there is no such place."""
        if request not in self._since or not request.route.overcommitted:  # any more
            return True  # noqa: ASYNC910  # and has cost nothing
        if (route := routing.choose_idle(request.remaining, request.avoided)) is not None:
            self.discard(request)
            request.move(route)
        await trio.lowlevel.checkpoint()
        return route is not None


def _tokens(request: Movable) -> int:
    return generation_tokens(request.remaining)


def _gives_way(request: Movable, waited_s: float, move_after_s: float) -> bool:
    """Whether a request of a pair leaves its workers to requests of other routers, which may wait for it."""
    load = request.route.decode.load
    return (
        request.route.prefill is not None
        and load.routers > 1
        and waited_s >= move_after_s * 2**request.moves * (1 + load.place)
    )
