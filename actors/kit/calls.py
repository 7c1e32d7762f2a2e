"""Calls between actors: an address to ask, a call to answer, and the answer with its stream of replies.

An actor is asked through an `Address`, which puts a `Call` into its inbox; both ends hold the call's `Answer`. The
asker promises *credit*, the units it has space for: an answerer can run ahead of it by no more.

Replies are handed over synchronously. No task has to be scheduled for a reply to pass an actor that only transforms
replies: such an actor *relays* them with a plain function, run by the task that puts the reply. An answer thus passes
through a chain of actors without a task switch for each, and there is no queue on its way that could fill.

An asker that leaves the context of `ask`, for any reason, cancels the scope of the answering task. An answerer that
ends the body of `Call.answering`, for any reason, ends the answer. So neither end can forget the other. Nothing here
retries a call, or depends on where it is answered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from copy import copy
from typing import Generic, Protocol, TypeVar

import trio
from attrs import Factory, define, field, frozen

from actors.kit.fast_path import AnyFastPath, Record, RelayedAnswer, ignore_tokens
from actors.kit.groups import consists_of, first_of, raise_part
from protocol.errors import ActorError, ActorLost, AskerLeft, InternalError, RequestError, TooManyInternalErrors
from protocol.trace import log_fields

Req = TypeVar("Req")
Rep = TypeVar("Rep")
Res = TypeVar("Res")
Req_contra = TypeVar("Req_contra", contravariant=True)

log = logging.getLogger(__name__)


class CreditExceeded(Exception):
    """A bug of the answerer: it has put more units than the asker promised credit for."""


@define(eq=False)
class Answer(Generic[Rep, Res]):
    """The answer to one request: replies in order, then a result or a `RequestError`.

    The answerer puts replies into it; the asker takes them out, by iteration or by a relay. `credit` is the number of
    units that the answerer may still put; it bounds the buffer.
    """

    credit: int
    over: trio.Event = field(factory=trio.Event)  # set once the answerer holds nothing for this request any more
    _waiting: deque[Rep] = field(factory=deque)
    _receiver: Callable[[Rep], None] | None = None  # the relay's, once one has begun
    _changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _result: Res | None = None
    _failure: RequestError | None = None  # without a traceback: see `_raised`
    _receiver_error: Exception | None = None
    _abandoned: bool = False
    _first_wakes: bool = False  # the first reply wakes the relay, whose deadline depends on it
    fast_path: AnyFastPath | None = None  # the way of tokens that skip this answer's relay

    # The answerer's side, all of it synchronous ----------------------------------------

    def put(self, reply: Rep, units: int = 1) -> None:
        """Hand over the next reply, which costs `units` of credit; it is dropped if the asker has left."""
        if self.fast_path is not None:
            self.fast_path.settle()
        if units > self.credit:
            raise CreditExceeded(f"{units} units put, {self.credit} promised")
        self.credit -= units
        if self.fast_path is not None:
            self.fast_path.measure()
        if self._receiver is not None:
            self._deliver(reply)
        elif not self._abandoned:
            self._waiting.append(reply)
            self._changed.unpark_all()

    def end(self, result: Res | None) -> None:
        """End the answer with its result."""
        if not self.over.is_set():
            self._result = result
            self._close()

    def fail(self, error: RequestError) -> None:
        """End the answer with an error instead of a result; no effect on an answer that has ended."""
        if not self.over.is_set():
            self._failure = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
            self._close()

    # The asker's side ------------------------------------------------------------------

    def __aiter__(self) -> Answer[Rep, Res]:
        """Iterate over the replies; raises the `RequestError` that the answer ended with, if it did."""
        return self

    async def __anext__(self) -> Rep:
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self.over.is_set():
                if self._failure is not None:
                    raise self._raised(self._failure)
                raise StopAsyncIteration
            await self._changed.park()
        return self._waiting.popleft()

    async def relay(
        self,
        receiver: Callable[[Rep], None],
        until: Callable[[], float] | None = None,
        fast_path: AnyFastPath | None = None,
    ) -> Res | None:
        """Call `receiver` with every reply, in the task that puts it, and return the result.

        Raises the receiver's error, or the `RequestError` of the answer. `until` returns the deadline of the relay on
        Trio's clock. It is evaluated at the first reply, at each deadline and at `recheck`, so it may be brought
        forward only there. The result is None once the deadline has passed, and after `abandon()`. With a `fast_path`
        plain tokens may go to its receiver instead.
        """
        await trio.lowlevel.checkpoint()
        self._receiver = receiver
        self._first_wakes = until is not None
        while self._waiting:
            self._deliver(self._waiting.popleft())
        if fast_path is not None and not (self.over.is_set() or self._abandoned):
            fast_path.attach(self, None, ignore_tokens)
        while not (self.over.is_set() or self._abandoned):
            if self.fast_path is not None:
                self.fast_path.settle()  # the deadline depends on the last token
            if until is None:
                await self._changed.park()
            elif (deadline := until()) <= trio.current_time():
                break
            else:
                with trio.move_on_at(deadline):
                    await self._changed.park()
        return self._outcome()

    async def result(self) -> Res | None:
        """Wait for the end of the answer, drop its replies, and return its result."""
        return await self.relay(_drop)

    @property
    def failure(self) -> RequestError | None:
        """The error that the answer ended with, if it did; it can be read after leaving, too."""
        return self._failure

    def extend_fast_path(self, source: RelayedAnswer, record: Record) -> None:
        """Attach `source`, whose relay puts every token into this answer, to the fast path of this one, if any."""
        if self.fast_path is not None and source.fast_path is None:
            self.fast_path.attach(source, self, record)

    def fail_relay(self, error: Exception) -> None:
        """Raise `error` in the relay, and take no more replies."""
        self._receiver_error = self._receiver_error or error
        self.abandon()

    def recheck(self) -> None:
        """Have the relay evaluate its deadline anew."""
        self._changed.unpark_all()

    def abandon(self) -> None:
        """Drop all further replies; a relay returns None."""
        if self.fast_path is not None:
            self.fast_path.detach(self)
        self._abandoned = True
        self._receiver = _drop
        self._waiting.clear()
        self._changed.unpark_all()

    def _outcome(self) -> Res | None:
        """Return a relay's result, or raise its error."""
        if self._receiver_error is not None:
            raise self._receiver_error
        if self._failure is not None and not self._abandoned:
            raise self._raised(self._failure)
        return self._result

    def _raised(self, failure: RequestError) -> RequestError:
        """Return the failure to raise, and keep a copy of it.

        The traceback of a raised error refers to frames, and these to this answer. If the answer kept the error, all
        objects of the frames, such as the pixels of an image, would wait for the garbage collector.
        """
        self._failure = copy(failure)
        return failure

    def _deliver(self, reply: Rep) -> None:
        assert self._receiver is not None
        try:
            self._receiver(reply)
        except Exception as error:  # noqa: BLE001  # it is raised again, in the task of the relay
            self.fail_relay(error)
        if self._first_wakes:
            self._first_wakes = False
            self._changed.unpark_all()

    def _close(self) -> None:
        if self.fast_path is not None:
            self.fast_path.detach(self)
        self.over.set()
        self._changed.unpark_all()


def _drop(_: object) -> None:
    pass


@define(eq=False)
class BugCounter:
    """The bugs of an actor: each fails its request, more than `bugs_max` within `window_s` fail the actor."""

    bugs_max: int = 5
    window_s: float = 60.0
    _times: deque[float] = Factory(deque)

    def count(self, error: Exception) -> None:
        """Count one bug; raises `TooManyInternalErrors` if that is one too many."""
        now = trio.current_time()
        self._times.append(now)
        while self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) > self.bugs_max:
            raise TooManyInternalErrors(f"{len(self._times)} bugs in {self.window_s} s") from error


@define(eq=False)
class Call(Generic[Req, Rep, Res]):
    """One request in flight, as its answerer has it; its scope is cancelled when the asker leaves."""

    request: Req
    answer: Answer[Rep, Res]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    begun: bool = False  # an answerer has taken it
    on_left: Callable[[], None] | None = None  # called if the asker leaves before that

    @contextmanager
    def answering(self, bugs: BugCounter) -> Iterator[Answer[Rep, Res]]:
        """Answer the call by running the body: the call ends as the body ends.

        A `RequestError` fails the call. An `ActorError` passes through and ends the actor. Anything else is a bug, even
        if it comes in one group with a `RequestError`: it is logged with the request's id, counted, and fails the call
        as `internal` unless the `RequestError` does.
        """
        self.begun = True
        thrown: BaseException | None = None
        try:
            with self.scope:
                try:
                    yield self.answer
                except BaseException as error:
                    thrown = error
                    raise
        except Exception as error:  # noqa: BLE001  # it is raised again, or fails the call
            self._fail(error, bugs)
        except BaseExceptionGroup as group:
            cancelled, others = group.split(trio.Cancelled)
            try:
                if cancelled is None or not isinstance(others, ExceptionGroup):
                    raise
                self._fail(others, bugs)
                raise_part(cancelled)
            finally:
                del cancelled, others  # their tracebacks refer to this frame, and so to all that the call held
        finally:
            self.answer.fail(ActorLost("the actor that was answering has ended"))  # no effect if the answer has ended
            # Since Python 3.12 this frame refers to the one that threw the error, which refers to the error.
            if thrown is not None:
                thrown.__traceback__ = None
                del thrown

    def leave(self) -> None:
        """Cancel the call: its asker has left."""
        # The scope first, so that an answerer that still runs is cancelled before its replies are dropped.
        self.scope.cancel(reason="the asker left")
        self.answer.abandon()
        if not self.begun:  # no answerer holds anything for it
            self.answer.fail(AskerLeft("the asker left before anybody answered"))
            if self.on_left is not None:
                self.on_left()

    def _fail(self, error: Exception, bugs: BugCounter) -> None:
        """Fail the call with what was raised while it was answered; raises what ends the actor."""
        failure = first_of(error, RequestError)
        if failure is not None:
            self.answer.fail(failure)
        if first_of(error, ActorError) is not None:
            raise error  # the actor cannot go on, even if the group has other errors
        if not consists_of(error, RequestError):
            request_id, trace = getattr(self.request, "id", None), getattr(self.request, "trace", None)
            log.error("a bug failed a request", exc_info=error, extra={"request_id": request_id, **log_fields(trace)})
            self.answer.fail(InternalError("the server made a mistake; its log has the details"))
            bugs.count(error)


class Askable(Protocol[Req_contra, Rep, Res]):
    """Something that can be asked: an actor of this process, or one at the other end of a link."""

    def ask(self, request: Req_contra, credit: int) -> AbstractAsyncContextManager[Answer[Rep, Res]]:
        """Ask, with credit for `credit` units of replies; leaving the context cancels the call."""


T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Inbox(Protocol[T_co]):
    """The receiving end of an actor's calls."""

    async def receive(self) -> T_co:
        """Wait for the next call and take it."""


class Inlet(Protocol[T_contra]):
    """The sending end of an actor's calls."""

    async def send(self, value: T_contra, /) -> None:
        """Put a call in; waits while there is no room."""


@frozen
class Address(Generic[Req, Rep, Res]):
    """The address of an actor of this process: the sending end of its inbox."""

    inbox: Inlet[Call[Req, Rep, Res]]

    @asynccontextmanager
    async def ask(self, request: Req, credit: int) -> AsyncIterator[Answer[Rep, Res]]:
        """Ask; waits while the inbox is full. Leaving the context cancels the call."""
        call: Call[Req, Rep, Res] = Call(request, Answer(credit))
        try:
            await self.inbox.send(call)
            yield call.answer
        finally:
            call.leave()


@frozen
class Function(Generic[Req, Rep, Res]):
    """A function that can be asked: it returns the result, and the answer has no replies."""

    function: Callable[[Req], Awaitable[Res]]

    @asynccontextmanager
    async def ask(self, request: Req, credit: int) -> AsyncIterator[Answer[Rep, Res]]:
        """Ask; the answer has ended when the context begins. A bug of the function is logged and fails the call."""
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
    """Return the address and the inbox of an actor; `size` calls may wait in it, first come, first served."""
    send, receive = trio.open_memory_channel[Call[Req, Rep, Res]](size)
    return Address(send), receive
