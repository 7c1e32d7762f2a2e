"""The little that every actor shares: an address to ask, a call to answer, the answer as it comes.

Replies are handed over synchronously. Nobody has to run for a reply to pass: an actor that only transforms what comes
*relays* it with a plain function, and that function runs in the turn of whoever put the reply.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from math import inf
from typing import Generic, Protocol, TypeVar

import trio
from attrs import Factory, define, field, frozen

from actors.kit.groups import consists_of, first_of
from protocol.errors import ActorError, ActorLost, AskerLeft, InternalError, RequestError, TooManyInternalErrors
from protocol.trace import fields

Req = TypeVar("Req")
Rep = TypeVar("Rep")
Res = TypeVar("Res")
Req_contra = TypeVar("Req_contra", contravariant=True)

log = logging.getLogger(__name__)


class CreditExceeded(Exception):
    """A bug of the answerer: it put more than the asker promised space for."""


@define(eq=False)
class Answer(Generic[Rep, Res]):
    """What comes back for one request: replies in order, then a result or a `RequestError`.

    Its answerer puts into it, its asker takes out of it, by iterating or by a relay. `credit` is how many units the
    answerer may still put, so what waits here is bounded by what the asker promised.
    """

    credit: int
    over: trio.Event = field(factory=trio.Event)  # the answerer has ended and holds nothing more for this request
    _waiting: deque[Rep] = field(factory=deque)
    _into: Callable[[Rep], None] | None = None
    _news: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _result: Res | None = None
    _failure: RequestError | None = None
    _broken: Exception | None = None
    _enough: bool = False
    _first_wakes: bool = False  # the relay waits for the first reply with a deadline of its own

    # The answerer's side: all of it synchronous ----------------------------------------

    def put(self, reply: Rep, units: int = 1) -> None:
        """Hand over the next reply; what an asker who has left would get is dropped."""
        if units > self.credit:
            raise CreditExceeded(f"{units} units put, {self.credit} promised")
        self.credit -= units
        if self._into is not None:
            self._deliver(reply)
        elif not self._enough:
            self._waiting.append(reply)
            self._news.unpark_all()

    def end(self, result: Res | None) -> None:
        """Say that the answer is whole."""
        if not self.over.is_set():
            self._result = result
            self._close()

    def fail(self, error: RequestError) -> None:
        """Say that the answer will not be whole, and why; an answer that is over stays as it was."""
        if not self.over.is_set():
            self._failure = error
            self._close()

    # The asker's side ------------------------------------------------------------------

    def __aiter__(self) -> Answer[Rep, Res]:
        """Iterate over the replies; raises the `RequestError` that ended the answer, if one did."""
        return self

    async def __anext__(self) -> Rep:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self.over.is_set():
                if self._failure is not None:
                    raise self._failure
                raise StopAsyncIteration
            await self._news.park()
        return self._waiting.popleft()

    async def relay(self, into: Callable[[Rep], None], until: Callable[[], float] | None = None) -> Res | None:
        """Hand every reply to `into` in the turn in which it comes, and return the result.

        Raises what `into` raised, or the `RequestError` that ended the answer. `until` says up to what time (of Trio's
        clock) to wait, judged anew at the first reply and whenever that time has come, so it may come nearer at the
        first reply only; once it is past, as after `enough()`, the result is None.
        """
        await trio.lowlevel.checkpoint()
        self._into = into
        self._first_wakes = until is not None
        while self._waiting:
            self._deliver(self._waiting.popleft())
        while not (self.over.is_set() or self._enough):
            deadline = inf if until is None else until()
            if deadline <= trio.current_time():
                break
            with trio.move_on_at(deadline):
                await self._news.park()
        if self._broken is not None:
            raise self._broken
        if self._failure is not None and not self._enough:
            raise self._failure
        return self._result

    async def result(self) -> Res | None:
        """Wait for the end, dropping any replies, and return the result."""
        return await self.relay(_drop)

    @property
    def failure(self) -> RequestError | None:
        """What the answer ended in instead of a result, which also whoever has left may want to know."""
        return self._failure

    def abandon(self) -> None:
        """Take no more replies; a relay returns."""
        self._enough = True
        self._into = _drop
        self._waiting.clear()
        self._news.unpark_all()

    def _deliver(self, reply: Rep) -> None:
        assert self._into is not None
        try:
            self._into(reply)
        except Exception as error:  # noqa: BLE001  # it is raised again, in the relaying task
            self._broken = error
            self.abandon()
        if self._first_wakes:
            self._first_wakes = False
            self._news.unpark_all()

    def _close(self) -> None:
        self.over.set()
        self._news.unpark_all()


def _drop(_: object) -> None:
    pass


@define(eq=False)
class BugCounter:
    """Counts an actor's bugs: one fails its request, more than `most` in `window_s` fail the actor."""

    most: int = 5
    window_s: float = 60.0
    _seen: deque[float] = Factory(deque)

    def count(self, error: Exception) -> None:
        """Note one bug; raises `TooManyInternalErrors` if that is one too many."""
        now = trio.current_time()
        self._seen.append(now)
        while self._seen[0] <= now - self.window_s:
            self._seen.popleft()
        if len(self._seen) > self.most:
            raise TooManyInternalErrors(f"{len(self._seen)} bugs in {self.window_s} s") from error


@define(eq=False)
class Call(Generic[Req, Rep, Res]):
    """One request in flight, as its answerer sees it; its scope is cancelled when nobody wants the answer any more."""

    request: Req
    answer: Answer[Rep, Res]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    begun: bool = False  # somebody answers it
    when_left: Callable[[], None] | None = None  # called when its asker leaves before that

    @contextmanager
    def answering(self, bugs: BugCounter) -> Iterator[Answer[Rep, Res]]:
        """Run the body as this call's answer: how the body ends is how the call ends.

        A `RequestError` fails the call. An `ActorError` ends the actor. Anything else is a bug, also beside a
        `RequestError`: it fails the call as `internal` if nothing else does, is logged here with the request's id, and
        is counted.
        """
        self.begun = True
        try:
            with self.scope:
                yield self.answer
        except Exception as error:
            failure = first_of(error, RequestError)
            if failure is not None:
                self.answer.fail(failure)
            if first_of(error, ActorError) is not None:
                raise  # even beside the other: the actor is broken, whatever else went wrong
            if not consists_of(error, RequestError):  # some of it is an error of no request
                request_id, trace = getattr(self.request, "id", None), getattr(self.request, "trace", None)
                log.exception("a bug failed a request", extra={"request_id": request_id, **fields(trace)})
                self.answer.fail(InternalError("the server made a mistake; its log has the details"))
                bugs.count(error)
        finally:
            self.answer.fail(ActorLost("whoever was answering ended"))  # unless the answer is over by now


class Askable(Protocol[Req_contra, Rep, Res]):
    """Whatever can be asked: an actor in this process, or one at the other end of a link."""

    def ask(self, request: Req_contra, credit: int) -> AbstractAsyncContextManager[Answer[Rep, Res]]:
        """Ask, promising space for `credit` units; leaving the context is leaving the answer."""


T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Inbox(Protocol[T_co]):
    """Where an actor finds its calls, one after the other."""

    async def receive(self) -> T_co:
        """Wait for the next one."""


class Inlet(Protocol[T_contra]):
    """Where calls are put in."""

    async def send(self, value: T_contra, /) -> None:
        """Put one in, waiting while there is no room."""


@frozen
class Address(Generic[Req, Rep, Res]):
    """Where an actor of this process is asked: its inbox."""

    inbox: Inlet[Call[Req, Rep, Res]]

    @asynccontextmanager
    async def ask(self, request: Req, credit: int) -> AsyncIterator[Answer[Rep, Res]]:
        """Ask, waiting while the inbox is full; leaving the context is leaving the answer."""
        call: Call[Req, Rep, Res] = Call(request, Answer(credit))
        try:
            await self.inbox.send(call)
            yield call.answer
        finally:
            # The scope first: an answerer that runs on must find itself cancelled, not unheard.
            call.scope.cancel(reason="the asker left")
            call.answer.abandon()
            if not call.begun:  # nobody holds anything for it
                call.answer.fail(AskerLeft("the asker left before anybody answered"))
                if call.when_left is not None:
                    call.when_left()


@frozen
class Function(Generic[Req, Rep, Res]):
    """A function that can be asked: it returns the result, and there are no replies before that."""

    function: Callable[[Req], Awaitable[Res]]

    @asynccontextmanager
    async def ask(self, request: Req, credit: int) -> AsyncIterator[Answer[Rep, Res]]:
        """Ask; the answer is whole when the context is entered. A bug of the function is logged, and is `internal`."""
        answer: Answer[Rep, Res] = Answer(credit)
        try:
            answer.end(await self.function(request))
        except RequestError as error:
            answer.fail(error)
        except Exception:
            log.exception("a bug failed a %s", type(request).__name__)
            answer.fail(InternalError("the node made a mistake; its log has the details"))
        yield answer


def mailbox(size: int) -> tuple[Address[Req, Rep, Res], trio.MemoryReceiveChannel[Call[Req, Rep, Res]]]:
    """Return the address and the inbox of an actor that lets `size` calls wait."""
    send, receive = trio.open_memory_channel[Call[Req, Rep, Res]](size)
    return Address(send), receive
