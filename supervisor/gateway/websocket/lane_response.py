"""The answering of one response of a WebSocket: its events, its errors, and its place in the history.

Events are sent in the turn of the event loop in which their text comes, so a response has no queue of its own: the
backlog of a slow client is in the outbox. A completed or cancelled response is remembered, so that a later one can
continue it; a failed response is not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import trio
from attrs import define

from protocol.dialects import responses
from protocol.errors import (
    AskerLeft,
    ConnectionExpired,
    Overloaded,
    PreviousResponseNotFound,
    RequestError,
    SlowClient,
    TooLarge,
)
from protocol.messages.generation import FinishReason, Started
from protocol.messages.text import Accepted, Answered, CallPart, ChoiceEnded, Reasoning, Text
from protocol.trace import Trace
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.histories import Conversation, ResponseHistory
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.request_record import RequestRecord
from supervisor.gateway.requests import RenderedReply, internal_error

CREATE = "response.create"  # a WebSocket request in the access log
API = "responses"


class SendEvents(Protocol):
    """Writes events to the client."""

    def __call__(self, *events: bytes) -> int:
        """Write events, whole and in order, and return their size in bytes.

        Raises `SlowClient` or `trio.BrokenResourceError`.
        """


@define(eq=False)
class LaneResponse:
    """A response that is being answered."""

    request: responses.Create
    id: str  # of the request to the processor
    events: responses.Events
    record: RequestRecord
    previous: Conversation | None  # that it continues
    memory: MemoryReservation  # for the request
    begun: bool = False  # its first event has been sent
    choice: ChoiceEnded = ChoiceEnded(FinishReason.STOP)  # how it ended; a warm-up has no choice, and keeps this


@define(eq=False, kw_only=True)
class LaneAnswers:
    """The answering of all responses of one WebSocket."""

    gateway: Gateway
    key: ClientKey | None
    request_id: str  # of the connection
    expires_at: float
    send: SendEvents
    outbox: Outbox  # which `send` writes to
    history: ResponseHistory

    def events_of(self, request: responses.Create, response_id: str) -> responses.Events:
        """Return the builder of the events of a new response."""
        return responses.Events(request, request_id=response_id, created_at=int(self.gateway.runtime.now()))

    async def answer(self, running: LaneResponse) -> None:
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
            await self._send_last(running, (*begin, *events.cancelled(record.usage)))
        except RequestError as error:
            self._fail(running, error)
            return
        except Exception as bug:  # noqa: BLE001  # `internal_error` logs it
            self._fail(running, internal_error(bug, record.request_id, record.trace))
            return
        else:
            await self._send_last(running, last)
        turns = responses.turns_with_answer(request, None if request.warm_up else events.given)
        self.history.remember(request.stream_id, Conversation.after(previous, events.id, *turns))

    async def _send_last(self, running: LaneResponse, last: tuple[bytes, ...]) -> None:
        """Send the last events of a response, which repeat its text several times, once there is room for them."""
        with self.gateway.memory.answers.reserving(self.gateway.memory_owner(self.key)) as memory:
            # Without memory they go into the backlog at once, as all other events.
            with suppress(Overloaded, TooLarge):
                memory.grow(size := sum(map(len, last)))
                await self.outbox.wait_room(size)
            running.record.sent_bytes += self.send(*last)

    def _sender(self, running: LaneResponse) -> Callable[[RenderedReply], None]:
        """Return a function that sends the events of each reply, in the turn of its arrival."""
        send, events, record = self.send, running.events, running.record

        def on_reply(reply: RenderedReply) -> None:
            match reply:
                case Text() | Reasoning() | CallPart():
                    record.sent_bytes += send(*events.deltas(reply))
                case Started():
                    # The events that open the item leave in one write with the first text.
                    pass
                case Accepted():
                    running.begun = True
                    record.sent_bytes += send(*events.begin())
                case ChoiceEnded():
                    running.choice = reply

        return on_reply

    def _token_sender(self, running: LaneResponse, on_reply: Callable[[Text], None]) -> Callable[[Text], None]:
        """Return a function that sends the event of a plain token as `on_reply` does, in fewer steps."""
        send, events, delta, record = self.send, running.events, running.events.delta, running.record

        def on_token(text: Text) -> None:
            if events.opened:
                record.sent_bytes += send(delta(text))
            else:
                on_reply(text)

        return on_token

    def _previous(self, running: LaneResponse) -> Conversation | None:
        """Return the conversation that a request continues; raises `PreviousResponseNotFound`."""
        if trio.current_time() >= self.expires_at:
            raise ConnectionExpired("create a new connection to continue")
        continued = running.request.previous_response_id
        if continued is None:
            return None
        if running.previous is None:
            running.previous = self.history.find(continued)
        if running.previous is None:
            bytes_max = f"{self.gateway.limits.history_bytes_max} bytes (history_bytes_max)"
            why = (
                f"Previous response with id '{continued}' not found: a connection keeps the latest of each lane,"
                f" at most {bytes_max} with their images, and forgets one that a failed request of its lane continued;"
                " send the whole conversation."
            )
            raise PreviousResponseNotFound(why, param="previous_response_id")
        return running.previous

    def _fail(self, running: LaneResponse, error: RequestError) -> None:
        """Send the error of a failed response, and forget the response that it continued in its own lane."""
        request, record = running.request, running.record
        self.history.evict(request.stream_id, request.previous_response_id)
        if running.begun:
            record.sent_bytes += self.send(running.events.failed(error, record.usage))
        else:
            record.sent_bytes += self.send(responses.error_event(error, request.stream_id))
        self.log_refused(error, record.request_id, record.trace)

    def log_refused(self, error: RequestError, request_id: str, trace: Trace | None) -> None:
        """Log and count a request that was refused, or ended early."""
        self.gateway.access_log.log_refused(
            error, request_id=request_id, request_line=CREATE, key=self.key, trace=trace
        )

    def log_when_sent(self, record: RequestRecord, *, complete: bool) -> None:
        """Log and count a response once the socket has taken its last byte, or never will."""
        outbox, gateway = self.outbox, self.gateway

        def on_sent(whole: bool) -> None:
            # Other lanes' events may be among the lost bytes, so this is a lower bound.
            if not whole:
                record.sent_bytes = max(0, record.sent_bytes - outbox.lost_bytes)
            gateway.runner.settle(record, None if whole and complete else gateway.cut_reason(outbox))

        outbox.on_sent(on_sent)
