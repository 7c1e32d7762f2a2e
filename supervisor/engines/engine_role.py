"""The role of one engine of a node, its leg, which may change between two lives of the engine.

A new role is on trial until the engine is ready with it: a life that ends before gives the engine its former role back.

    settled -> a life ends for another role -> on trial -> ready -> settled
                                                   | ends before it is ready
                                                   former role -> settled
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import trio
from attrs import define, evolve, field

from protocol.errors import EngineRenewed
from protocol.messages.cluster import Leg
from protocol.messages.kind import Message
from protocol.messages.role import SetRole
from supervisor.config.schema import EngineSection, LegName
from supervisor.supervision.events import error_text
from supervisor.supervision.supervise import OnStarted


def _ignore() -> None:
    """Do nothing with a change."""


def with_leg(section: EngineSection, leg: Leg) -> EngineSection:
    """Return a section with another leg, one of an engine of tokens."""
    return evolve(section, leg=cast("LegName", leg.value))


class RunLife(Protocol):
    """Runs one life of an engine."""

    def __call__(self, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        """Run it until it ends; `started()` means that the engine can be asked."""


@define(eq=False)
class EngineRole:
    """The section of an engine with its present leg; `on_change` is called when another life may have another one."""

    section: EngineSection
    on_change: Callable[[], None] = _ignore
    failure: str = ""  # why the last new role was given up
    _next: EngineSection | None = field(init=False, default=None)  # from the end of the present life on
    _former: EngineSection | None = field(init=False, default=None)  # while the present role is on trial
    _changed: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    @property
    def leg(self) -> Leg:
        """The part of a request that the engine computes."""
        return Leg(self.section.leg)

    def renew(self, request: Message) -> EngineRenewed:
        """Give the next life the role of a request, and return the error that ends the present one."""
        assert isinstance(request, SetRole)
        self._next, self.failure = with_leg(self.section, request.role), ""
        return EngineRenewed(f"its role becomes {request.role}")

    async def settled(self) -> None:
        """Wait until no change is under way."""
        await trio.lowlevel.checkpoint()
        while self._next is not None or self._former is not None:
            await self._changed.park()

    async def run_life(self, run: RunLife, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC128  # `run` calls it
        """Run one life of the engine with the present role."""
        with self._life():
            await run(task_status=OnStarted(lambda: self._ready(task_status)))

    def _ready(self, task_status: trio.TaskStatus[None]) -> None:
        self._former = None
        self._changed.unpark_all()
        task_status.started()

    @contextmanager
    def _life(self) -> Iterator[None]:
        why = "it was not ready in time"
        try:
            yield
        except Exception as error:
            why = error_text(error)
            raise
        finally:
            if self._next is not None:
                self._former, self.section, self._next = self.section, self._next, None
                self.on_change()
            elif self._former is not None:
                self.section, self._former, self.failure = self._former, None, why
                self.on_change()
            self._changed.unpark_all()
