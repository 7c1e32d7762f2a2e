"""Workers that answer by one result, as a test scripts them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio
from attrs import Factory, define, field

from actors.kit.calls import Answer
from actors.routing.load import Load
from actors.routing.ports import RoutingObserver
from protocol.errors import RequestError

Req = TypeVar("Req")
Res = TypeVar("Res")


@define(eq=False)
class WholeWorkerByScript(Generic[Req, Res]):
    """A worker that takes a second for a request, and fails as often as its script says."""

    full_name: str
    errors: list[RequestError]
    answer: Callable[[Req], Res]
    slots: int = 4
    takes_s: float = 1.0
    busy: int = 0
    up: bool = True
    asked: list[Req] = Factory(list)
    changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)
    stage: trio.Nursery = field(init=False)

    @property
    def load(self) -> Load:
        """Its load."""
        return Load(self.full_name, self.busy, self.slots)

    @asynccontextmanager
    async def ask(self, request: Req, credit: int) -> AsyncIterator[Answer[Res, Res]]:
        """Ask; leaving ends its work."""
        assert credit == 0
        answer: Answer[Res, Res] = Answer(0)
        self.busy += 1
        self.asked.append(request)
        scope = trio.CancelScope()
        self.stage.start_soon(self._answer, request, answer, scope)
        try:
            yield answer
        finally:
            scope.cancel()
            self.busy -= 1
            self.changed.unpark_all()

    async def _answer(self, request: Req, answer: Answer[Res, Res], scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(self.takes_s)
            if self.errors:
                answer.fail(self.errors.pop(0))
            else:
                answer.end(self.answer(request))


@define(eq=False)
class WholeWorkers(Generic[Req, Res]):
    """A pool of such workers, by the names that encoders and embedders have there."""

    members: Sequence[WholeWorkerByScript[Req, Res]]
    stage: trio.Nursery
    changed: trio.lowlevel.ParkingLot = Factory(trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        for each in self.members:
            each.changed, each.stage = self.changed, self.stage

    def encoders(self) -> list[WholeWorkerByScript[Req, Res]]:
        """Return those that are up."""
        return [each for each in self.members if each.up]

    embedders = encoders

    async def wait_changed(self) -> None:
        """Wait until one is less busy, or until `changed` is unparked."""
        await self.changed.park()


@define(eq=False)
class NotingRouting(RoutingObserver):
    """Records the ends of calls."""

    ended: list[tuple[str, str]] = field(factory=list)

    def call_ended(self, worker: str, outcome: str) -> None:
        """Record an end."""
        self.ended.append((worker, outcome))
