"""The responses of one WebSocket: one after the other in a lane, and in several lanes at the same time.

A lane is a name that the client chooses. It exists while a response of it runs, waits or is kept in the history. Each
response may continue an earlier one, of any lane. Only a response that runs is a task; one that waits is an entry in a
list, in the order in which the requests came. Events are sent in the turn in which their text comes, so a response has
no queue of its own, and what a slow client has not read is in the outbox alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio
from attrs import define, field

from protocol.dialects import responses
from protocol.dialects.targets import NO_TARGETS, Targets
from protocol.errors import (
    AskerLeft,
    ConnectionExpired,
    Overloaded,
    PreviousResponseNotFound,
    RequestError,
    SlowClient,
    StreamLimitReached,
)
from protocol.messages.generation import FinishReason, Started, Usage
from protocol.messages.text import Accepted, Answered, ChoiceEnded, Role, Text, Turn
from protocol.trace import Trace, child_span
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.histories import Conversation, ResponseHistory
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.requests import RenderedReply, RequestRecord, internal_error

CREATE = "response.create"  # a WebSocket request in the access log
API = "responses"
REQUEST_BYTES_FREE = 1024  # of each request, so that small ones are accepted when the budget is used up


class SendEvents(Protocol):
    """Writes events to the client."""

    def __call__(self, *events: bytes) -> int:
        """Write events, whole and in order, and return their size in bytes.

        Raises `SlowClient` or `trio.BrokenResourceError`.
        """


@define(eq=False)
class _Running:
    """A response that is being answered."""

    request: responses.Create
    id: str  # of the request to the processor
    events: responses.Events
    record: RequestRecord
    previous: Conversation | None  # that it continues
    memory: MemoryReservation  # for the request
    begun: bool = False  # its first event has been sent
    choice: ChoiceEnded = ChoiceEnded(FinishReason.STOP)  # how it ended; a warm-up has no choice, and keeps this


@define(eq=False)
class _Waiting:
    """A request that waits for its lane, for a free place, or for the response that it forks from."""

    request: responses.Create
    memory: MemoryReservation
    previous: Conversation | None = None  # that it forks from, which may be forgotten before its turn comes
    parent: _Running | None = None  # the response that it forks from, until that has ended


@define(eq=False)
class Lanes:
    """All lanes of one connection."""

    gateway: Gateway
    key: ClientKey | None
    request_id: str  # of the connection
    caller: Trace | None  # where the client stood in a trace when it connected
    expires_at: float
    send: SendEvents
    on_lost: Callable[[Exception], None]  # called with the exception of `send`
    on_idle: Callable[[], None]  # called when nothing runs or waits any more
    tasks: trio.Nursery
    outbox: Outbox  # which `send` writes to
    targets: Targets = NO_TARGETS  # of requests that name none
    _history: ResponseHistory = field(init=False)
    _running: dict[str | None, _Running] = field(factory=dict)  # by lane
    _waiting: list[_Waiting] = field(factory=list)  # in the order in which they came

    def __attrs_post_init__(self) -> None:
        bytes_max, owner = self.gateway.limits.history_bytes_max, "" if self.key is None else self.key.name
        self._history = ResponseHistory(bytes_max, self.gateway.memory.histories, owner)

    @property
    def busy(self) -> bool:
        """Whether any response runs or waits."""
        return bool(self._running or self._waiting)

    # Requests of the client -----------------------------------------------------------------

    def create(self, request: responses.Create, size_bytes: int) -> None:
        """Answer a request of `size_bytes` when its turn comes; raises `StreamLimitReached` or `Overloaded`."""
        limits, lane, continued = self.gateway.limits, request.stream_id, request.previous_response_id
        waiting_lanes = (waiting.request.stream_id for waiting in self._waiting)
        lanes = {*self._running, *waiting_lanes, *self._history.lanes} - {None}
        if lane is not None and lane not in lanes and len(lanes) >= limits.websocket_lanes_max:
            raise StreamLimitReached(f"this connection has {len(lanes)} lanes, as many as it may", param="stream_id")
        memory = self.gateway.memory.bodies.reserve(self.gateway.memory_owner(self.key), REQUEST_BYTES_FREE)
        memory.grow(size_bytes)
        waiting = _Waiting(request, memory)
        if continued is not None and self._history.find_in(lane, continued) is None:
            waiting.previous = self._history.find(continued)
            others = (running for running in self._running.values() if running.request.stream_id != lane)
            waiting.parent = next((running for running in others if running.events.id == continued), None)
        self._waiting.append(waiting)
        self._start_waiting()
        if len(self._waiting) > limits.websocket_queue_max and self._waiting[-1] is waiting:
            self._waiting.pop()
            memory.release()
            raise Overloaded(f"{len(self._waiting)} responses wait for their turn on this connection")

    def cancel(self, event: responses.CancelResponse) -> None:
        """End the response that the event names; cancelling one that has ended does nothing.

        Without an id it is the one that runs in that lane, or else the first that waits there.
        """
        if (running := self._named(event)) is not None:
            self.gateway.runner.abort(running.record, AskerLeft("the client sent response.cancel"))
            return
        if event.response_id is None:  # one that waits has no id yet
            waiting = (waiting for waiting in self._waiting if waiting.request.stream_id == event.stream_id)
            if (first := next(waiting, None)) is not None:
                self._drop(first)

    def cancels_running(self, event: responses.Create | responses.CancelResponse) -> bool:
        """Whether an event ends a response that runs, so that it may overtake others."""
        return isinstance(event, responses.CancelResponse) and self._named(event) is not None

    def forget(self, lane: str | None, response_id: str | None) -> None:
        """Forget a response that a failed request of the same lane was to continue, as OpenAI's server does."""
        self._history.evict(lane, response_id)

    def close(self) -> None:
        """Give back all memory, at the end of the connection."""
        for memory in (*(each.memory for each in self._waiting), *(each.memory for each in self._running.values())):
            memory.release()
        self._history.clear()

    def _named(self, event: responses.CancelResponse) -> _Running | None:
        for running in self._running.values():
            in_lane = event.stream_id == running.request.stream_id
            if running.events.id == event.response_id:
                named = in_lane or event.stream_id is None
            else:
                named = in_lane and event.response_id is None
            if named:
                return running
        return None

    def _drop(self, waiting: _Waiting) -> None:
        """End a response that never ran."""
        self._waiting.remove(waiting)
        waiting.memory.release()
        response_id = self.gateway.runtime.new_id()
        events = self._events(waiting.request, response_id)
        self.send(*events.begin(), *events.cancelled(Usage(0, 0)))
        left = AskerLeft("the client sent response.cancel")
        self._log_refused(left, f"{self.request_id}/{response_id}", self._trace())
        self._start_waiting()
        self._check_idle()

    # Turns of the lanes -----------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start every request that can run now, the oldest first."""
        taken = set(self._running)
        for waiting in tuple(self._waiting):
            if len(self._running) >= self.gateway.limits.websocket_running_max:
                break
            lane = waiting.request.stream_id
            if lane not in taken and waiting.parent is None:
                self._waiting.remove(waiting)
                self._start(waiting)
            taken.add(lane)

    def _start(self, waiting: _Waiting) -> None:
        request, response_id = waiting.request, self.gateway.runtime.new_id()
        record = RequestRecord(
            f"{self.request_id}/{response_id}",
            request.model,
            API,
            trio.current_time(),
            key=self.key,
            request_line=CREATE,
            trace=self._trace(),
            targets=self.targets,
            settles=False,
        )
        events = self._events(request, response_id)
        running = _Running(request, response_id, events, record, waiting.previous, waiting.memory)
        self._running[request.stream_id] = running
        self.tasks.start_soon(self._run, running, name=f"response {response_id}")

    def _trace(self) -> Trace:
        return child_span(self.caller, self.gateway.runtime.new_id())

    def _events(self, request: responses.Create, response_id: str) -> responses.Events:
        return responses.Events(request, request_id=response_id, created_at=int(self.gateway.runtime.now()))

    async def _run(self, running: _Running) -> None:
        """Answer one request, and start those that waited for it, unless the client is gone."""
        complete = False
        try:
            await self._answer(running)
            complete = True
            self._ended(running)
        except (SlowClient, trio.BrokenResourceError) as error:
            self.on_lost(error)
        finally:
            self._log_when_sent(running.record, complete=complete)

    def _log_when_sent(self, record: RequestRecord, *, complete: bool) -> None:
        """Log and count a response once the socket has taken its last byte, or never will."""
        outbox, gateway = self.outbox, self.gateway

        def on_sent(whole: bool) -> None:
            if not whole:  # other lanes' events may be among the lost bytes, so this is a lower bound
                record.sent_bytes = max(0, record.sent_bytes - outbox.lost_bytes)
            gateway.runner.settle(record, None if whole and complete else gateway.cut_reason(outbox))

        outbox.on_sent(on_sent)

    def _ended(self, running: _Running) -> None:
        del self._running[running.request.stream_id]
        running.memory.release()
        for waiting in self._waiting:
            if waiting.parent is running:
                waiting.parent, waiting.previous = None, self._history.find(running.events.id)
        self._start_waiting()
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.busy:
            self.on_idle()

    # Answering --------------------------------------------------------------------------------

    async def _answer(self, running: _Running) -> None:
        """Send one response from its first event to its last, and keep it in the history if it can be continued."""
        request, events, record = running.request, running.events, running.record

        def finish(answered: Answered) -> tuple[bytes, ...]:
            return events.finish(running.choice, answered.usage)

        try:
            previous = self._previous(running)
            history = () if previous is None else previous.turns
            served = self.gateway.runner.find(request.model)
            session = f"{self.request_id}/{request.stream_id or ''}"
            respond = responses.to_respond(request, request_id=running.id, history=history, session=session)
            on_reply = self._sender(running)
            on_token = self._token_sender(running, on_reply)
            last = await self.gateway.answer(respond, served, record, on_reply, finish, on_token)
        except (SlowClient, trio.BrokenResourceError):
            raise
        except AskerLeft:
            previous = running.previous
            begin = () if running.begun else events.begin()
            record.sent_bytes += self.send(*begin, *events.cancelled(record.usage))
        except RequestError as error:
            self._fail(running, error)
            return
        except Exception as bug:  # noqa: BLE001  # `internal_error` logs it
            self._fail(running, internal_error(bug, record.request_id, record.trace))
            return
        else:
            with self.gateway.memory.answers.reserving(self.gateway.memory_owner(self.key)) as memory:
                with suppress(Overloaded):  # then they go into the backlog at once, as every other event does
                    memory.grow(size := sum(map(len, last)))
                    await self.outbox.wait_room(size)  # they repeat the text several times
                record.sent_bytes += self.send(*last)
        turns = [*map(responses.continued, request.turns())]
        if not request.warm_up:
            turns.append(Turn(Role.ASSISTANT, events.text))
        self._history.remember(request.stream_id, Conversation.after(previous, events.id, *turns))

    def _sender(self, running: _Running) -> Callable[[RenderedReply], None]:
        """Return a function that sends the events of each reply, in the turn in which the reply comes."""
        send, events, record = self.send, running.events, running.record

        def on_reply(reply: RenderedReply) -> None:
            match reply:
                case Text():
                    record.sent_bytes += send(*events.deltas(reply))
                case Started():
                    pass  # the events that open the item leave in one write with the first text
                case Accepted():
                    running.begun = True
                    record.sent_bytes += send(*events.begin())
                case ChoiceEnded():
                    running.choice = reply

        return on_reply

    def _token_sender(self, running: _Running, on_reply: Callable[[Text], None]) -> Callable[[Text], None]:
        """Return a function that sends the event of a plain token as `on_reply` does, in fewer steps."""
        send, events, delta, record = self.send, running.events, running.events.delta, running.record

        def on_token(text: Text) -> None:
            if events.opened:
                record.sent_bytes += send(delta(text))
            else:
                on_reply(text)

        return on_token

    def _previous(self, running: _Running) -> Conversation | None:
        """Return the conversation that a request continues; raises `PreviousResponseNotFound`."""
        if trio.current_time() >= self.expires_at:
            raise ConnectionExpired("create a new connection to continue")
        continued = running.request.previous_response_id
        if continued is None:
            return None
        if running.previous is None:
            running.previous = self._history.find(continued)
        if running.previous is None:
            bytes_max = f"{self.gateway.limits.history_bytes_max} bytes (history_bytes_max)"
            why = (
                f"Previous response with id '{continued}' not found: a connection keeps the latest of each lane,"
                f" at most {bytes_max} with their images; send the whole conversation."
            )
            raise PreviousResponseNotFound(why, param="previous_response_id")
        return running.previous

    def _fail(self, running: _Running, error: RequestError) -> None:
        """Send the error by which a response failed, and forget the response that it continued in its own lane."""
        request, record = running.request, running.record
        self.forget(request.stream_id, request.previous_response_id)
        if running.begun:
            record.sent_bytes += self.send(running.events.failed(error, record.usage))
        else:
            record.sent_bytes += self.send(responses.error_event(error, request.stream_id))
        self._log_refused(error, record.request_id, record.trace)

    def _log_refused(self, error: RequestError, request_id: str, trace: Trace | None) -> None:
        self.gateway.access_log.log_refused(
            error, request_id=request_id, request_line=CREATE, key=self.key, trace=trace
        )
