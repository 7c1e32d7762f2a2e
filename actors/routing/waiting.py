"""Requests that wait for another route, in lines: one line for each set of workers.

A lost worker may leave hundreds of requests waiting for the others. Were each of them to look at each change, every
ended answer would cost as many choices. So only the first of a line looks, and while it finds a route it looks for the
requests behind it as well, in the same turn: they come before requests without a first route. They go on one after the
other: the next one may find the first one's prompt in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable

import trio
from attrs import define, field

from actors.routing.route import Route
from protocol.messages.generation import Generate


@define(eq=False)
class _Waiting:
    """One request, and its route once it has one; `woken` is set when it may go on, or is the first of its line."""

    request: Generate
    route: Route | None = None
    woken: trio.Event = field(factory=trio.Event)
    following: _Waiting | None = None  # the request that got a route after it


@define(eq=False)
class WaitingLines:
    """The lines of one router, by the workers that the requests may go to."""

    _lines: dict[Hashable, deque[_Waiting]] = field(factory=dict)

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return sum(map(len, self._lines.values()))

    @property
    def lines(self) -> int:
        """The number of lines, none of which is empty."""
        return len(self._lines)

    async def wait(
        self,
        key: Hashable,
        request: Generate,
        choose: Callable[[Generate], Route | None],
        wait_changed: Callable[[], Awaitable[None]],
    ) -> Route:
        """Return a route for a request once those before it in its line have one; cancelled, it leaves none behind.

        `choose` must find one for every request of a line or for none; only after `wait_changed` it may find another.
        """
        await trio.lowlevel.checkpoint()
        line = self._lines.setdefault(key, deque())
        own = _Waiting(request)
        line.append(own)
        try:
            while own.route is None:
                if line[0] is not own:
                    await own.woken.wait()
                    continue
                _serve(line, choose)
                if own.route is None:
                    await wait_changed()
        except BaseException:
            if own.route is not None:
                own.route.end()
            else:
                line.remove(own)
            raise
        finally:
            if own.following is not None:
                own.following.woken.set()
            if line:
                line[0].woken.set()
            elif self._lines.get(key) is line:
                del self._lines[key]
        return own.route


def _serve(line: deque[_Waiting], choose: Callable[[Generate], Route | None]) -> None:
    """Give routes to the first of a line, as long as there are any; each of them lets the next go on."""
    last: _Waiting | None = None
    while line and (route := choose(line[0].request)) is not None:
        served = line.popleft()
        served.route = route
        if last is not None:
            last.following = served
        last = served
