"""Threads for work that may never end, such as reading a dead disk, shared fairly between the owners of requests.

Such a thread cannot be ended. A caller leaves it behind after a time, and it counts as its owner's until it ends. So
one owner has its part of the threads alone, and the others find one at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import trio
from attrs import define

from actors.kit.fair_budget import FairBudget, Share
from protocol.errors import Overloaded
from supervisor.threads.text_threads import NO_THREAD

T = TypeVar("T")


@define(eq=False)
class SharedThreads:
    """Runs work in the threads of a budget, whose units they are."""

    budget: FairBudget

    async def run(self, function: Callable[[], T], *, owner: str, wait_s: float, within_s: float) -> T:
        """Return the result of the function, or raise its error; the work begins within `wait_s`, or not at all.

        Raises `TooSlowError` if the work takes longer than `within_s`. Raises `Overloaded` if its owner, or all owners
        together, have no thread for it in time.
        """
        with trio.CancelScope(deadline=trio.current_time() + wait_s) as scope:
            place = _Place(self.budget, owner, scope, within_s)
            limiter = cast("trio.CapacityLimiter", place)
            try:
                return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)
            except RuntimeError as error:
                if str(error) == NO_THREAD:
                    raise Overloaded(f"the system has no thread left for {self.budget.name}") from error
                raise
        if place.begun:
            raise trio.TooSlowError
        raise Overloaded(f"as many requests as may wait for {self.budget.name}, and none was free within {wait_s:g} s")


@define(eq=False)
class _Place:
    """The thread of one caller: a capacity limiter for Trio, released when the work has ended.

    The time of the work is counted from when it has a thread.
    """

    budget: FairBudget
    owner: str
    scope: trio.CancelScope
    within_s: float
    share: Share | None = None

    @property
    def begun(self) -> bool:
        """Whether there was a thread for the work."""
        return self.share is not None

    async def acquire_on_behalf_of(self, _: object) -> None:
        self.share = await self.budget.take(1, self.owner)
        self.scope.deadline = trio.current_time() + self.within_s

    def release_on_behalf_of(self, _: object) -> None:
        if self.share is not None:
            self.share.shrink(0)
