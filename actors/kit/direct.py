"""Calls that an actor answers in the tasks of their askers.

A call through an inbox costs a task, and several switches between tasks, before anything is done for it. An actor whose
calls hold nothing but their own state can do without: its *direct address* runs the actor's own function in the task
that relays the answer. A call goes through the inbox if it cannot begin at once, or if its asker iterates over the
answer or sets a deadline; the answer is the same.

The actor stays an actor. It alone decides which calls begin, while it lives; a call that it answers directly counts as
any other against its limits and its bugs, and ends with the actor as the tasks of its nursery do: cancelled, with
`ActorLost` for the asker. A bug too many fails the actor, not the asker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, TypeAlias

import trio
from attrs import define, field, frozen

from actors.kit.calls import Answer, Call, Inlet, Rep, Req, Res
from actors.kit.fast_path import AnyFastPath, ignore_tokens

END_WITHIN_S = 2.0
"""How long an actor waits for the direct calls that it has cancelled, which have nothing to wait for but threads."""

Answerer: TypeAlias = Callable[[Call[Req, Rep, Res]], Awaitable[None]]
"""Answers one call, by `Call.answering`."""


def _always(_: object) -> bool:
    return True


@define(eq=False)
class DirectCalls(Generic[Req, Rep, Res]):
    """The calls that one actor answers in the tasks of their askers; it outlives restarts, as an inbox does.

    `pass_by` counts a request as taken from the inbox, unless calls wait there that come first: then it returns False.
    """

    pass_by: Callable[[Req], bool] = _always
    _begin: Callable[[Req], Answerer[Req, Rep, Res] | None] | None = None
    _nursery: trio.Nursery | None = None  # the actor's
    _running: set[Call[Req, Rep, Res]] = field(factory=set)
    _ended: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    @property
    def running(self) -> int:
        """The number of calls that are being answered."""
        return len(self._running)

    @asynccontextmanager
    async def answered(
        self, begin: Callable[[Req], Answerer[Req, Rep, Res] | None], nursery: trio.Nursery
    ) -> AsyncIterator[None]:
        """Let calls be answered directly while the body runs, which is in the actor's nursery.

        `begin` returns the answerer of a request, to be run in the same turn; None sends the call to the inbox.
        """
        self._begin, self._nursery = begin, nursery
        try:
            yield
        finally:
            self._begin = self._nursery = None
            for call in self._running:
                call.scope.cancel(reason="the actor ends")
            with trio.move_on_after(END_WITHIN_S, shield=True):
                while self._running:
                    await self._ended.park()

    def begin(self, request: Req) -> Answerer[Req, Rep, Res] | None:
        """Return the answerer of a request, to be run in this turn; None if the request has to go through the inbox."""
        if self._begin is None or not self.pass_by(request):
            return None
        return self._begin(request)

    async def run(  # noqa: ASYNC910  # answering has checkpoints
        self, call: Call[Req, Rep, Res], answer_one: Answerer[Req, Rep, Res]
    ) -> None:
        """Answer a call in this task; an error that ends the actor is raised in the actor's nursery instead."""
        nursery = self._nursery
        self._running.add(call)
        try:
            await answer_one(call)
        except Exception as error:  # noqa: BLE001  # it is raised again, in the actor's nursery
            if nursery is not None and nursery is self._nursery:
                nursery.start_soon(_raise, error)
        finally:
            self._running.discard(call)
            self._ended.unpark_all()


async def _raise(error: Exception) -> None:  # noqa: ASYNC124  # a task of the nursery
    raise error


@define(eq=False)
class _DirectAnswer(Answer[Rep, Res], Generic[Req, Rep, Res]):
    """An answer that is computed by its relay, if the actor begins it at once; and the context in which it is asked."""

    address: DirectAddress[Req, Rep, Res] = field(kw_only=True)
    call: Call[Req, Rep, Res] | None = None  # None once the asker has left
    sent: bool = False  # whether the call went into the inbox

    async def __aenter__(self) -> Answer[Rep, Res]:
        return self  # noqa: ASYNC910  # relaying and iterating have checkpoints

    async def __aexit__(self, *_: object) -> None:
        # The call and the receiver refer to this answer: circles that would wait for the garbage collector.
        call, self.call = self.call, None
        self._receiver = None
        # A call that was answered in this task, and has ended, is not left.
        if call is not None and (self.sent or not self.over.is_set()):
            call.leave()

    async def __anext__(self) -> Rep:
        await self._send()
        return await super().__anext__()

    async def relay(
        self,
        receiver: Callable[[Rep], None],
        until: Callable[[], float] | None = None,
        fast_path: AnyFastPath | None = None,
    ) -> Res | None:
        """Relay as any answer; without `until` it is computed in this task, if the actor begins it at once."""
        direct, call = self.address.direct, self.call
        assert call is not None  # the asker has not left
        if until is None and not self.sent and (answer_one := direct.begin(call.request)) is not None:
            self._receiver = receiver
            if fast_path is not None:
                fast_path.attach(self, None, ignore_tokens)
            await direct.run(call, answer_one)
            return self._outcome()
        await self._send()
        return await super().relay(receiver, until, fast_path)

    def abandon(self) -> None:
        """Take no more replies; a call that is answered in this task is left at once."""
        super().abandon()
        if not self.sent and self.call is not None:
            self.call.scope.cancel(reason="the asker takes no more replies")

    async def _send(self) -> None:  # noqa: ASYNC910  # so have its callers, once it is sent
        if not self.sent:
            assert self.call is not None  # the asker has not left
            self.sent = True
            await self.address.inbox.send(self.call)


@frozen
class DirectAddress(Generic[Req, Rep, Res]):
    """The address of an actor that answers calls in the tasks of their askers, where it can."""

    inbox: Inlet[Call[Req, Rep, Res]]
    direct: DirectCalls[Req, Rep, Res]

    def ask(self, request: Req, credit: int) -> AbstractAsyncContextManager[Answer[Rep, Res]]:
        """Ask; the call begins with the relay, or the iteration, of its answer. Leaving the context cancels it."""
        answer: _DirectAnswer[Req, Rep, Res] = _DirectAnswer(credit, address=self)
        answer.call = Call(request, answer)
        return answer
