"""Parsing of the messages of one WebSocket, in their order, while the socket is still being read.

A long message is parsed in a thread, and all threads may be busy with other clients' texts. If reading waited for that,
pings behind the message would get no pong and a cancel would have no effect. So messages wait here meanwhile, up to a
limit; further ones are refused. A cancel of a running response overtakes waiting messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.offload import OFFLOAD_SIZE_MIN
from protocol.dialects import responses
from protocol.dialects.request_body import decode, reading_work
from protocol.errors import Overloaded, RequestError, SlowClient
from supervisor.gateway.gateway import Gateway
from supervisor.gateway.keys.keys import ClientKey
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.requests import NO_MEMORY

Event: TypeAlias = "responses.Create | responses.CancelResponse"
Fields: TypeAlias = dict[str, object]
"""The fields of a message's JSON object."""

MESSAGE_BYTES_FREE = 1024  # of each message, so that small ones are accepted when the budget is used up


@define(eq=False)
class MessageReader:
    """Parses messages, and passes each on as an event, or as the error with which it is answered."""

    gateway: Gateway
    key: ClientKey | None
    default_model: str | None  # of requests that name none
    while_open: Callable[[], AbstractContextManager[None]]  # cancels its body when the client leaves
    on_event: Callable[[Event | RequestError, Fields, int], None]  # called with the fields, and the size in bytes
    is_urgent: Callable[[Event], bool]  # whether an event may overtake messages that wait
    on_lost: Callable[[Exception], None]  # called with the exception of a write to the client
    on_idle: Callable[[], None]  # called when no message waits any more
    tasks: trio.Nursery
    _waiting: list[tuple[str, MemoryReservation]] = field(factory=list)  # a few; an empty deque takes 0.6 kB

    @property
    def busy(self) -> bool:
        """Whether a message waits, or is being parsed."""
        return bool(self._waiting)

    def receive(self, message: str) -> None:
        """Pass a message on in the turn in which it came, or later if it is long or others wait."""
        short, fields = reading_work(message) < OFFLOAD_SIZE_MIN, Fields()
        event = self._parse(message, fields) if short else None
        passes = not self._waiting or (not isinstance(event, RequestError | None) and self.is_urgent(event))
        if event is not None and passes:
            self.on_event(event, fields, message.__sizeof__())
            return
        waiting = len(self._waiting)
        if waiting > self.gateway.limits.websocket_queue_max:
            self.on_event(Overloaded(f"{waiting} messages wait to be read on this connection"), fields, 0)
            return
        memory = self.gateway.memory.bodies.reserve(self.gateway.memory_owner(self.key), MESSAGE_BYTES_FREE)
        try:
            memory.grow(message.__sizeof__())
        except Overloaded as error:
            self.on_event(error, fields, 0)
            return
        self._waiting.append((message, memory))
        if not waiting:
            self.tasks.start_soon(self._parse_waiting)

    def _parse(self, message: str, fields: Fields) -> Event | RequestError:
        """Return the event of a message, or the error with which it is answered; adds its JSON fields to `fields`."""
        try:
            fields.update(decode(message))
            left_out = self.gateway.leave_out_tools
            return responses.read_event(fields, default_model=self.default_model, leave_out=left_out)
        except RequestError as error:
            return error
        except MemoryError:
            return Overloaded(NO_MEMORY)

    async def _parse_waiting(self) -> None:
        """Pass on the messages that wait, in their order; each counts as waiting until it has been parsed."""
        try:
            while self._waiting:
                message, memory = self._waiting[0]
                fields = Fields()
                event = await self._parse_long(message, fields)
                self._waiting.pop(0)
                memory.release()
                if event is None:
                    return
                self.on_event(event, fields, message.__sizeof__())
        except (SlowClient, trio.BrokenResourceError) as error:
            self.on_lost(error)
        finally:
            while self._waiting:
                self._waiting.pop(0)[1].release()
            self.on_idle()

    async def _parse_long(self, message: str, fields: Fields) -> Event | RequestError | None:
        """Return the result of `_parse`, in a thread if the message is long; None if the client has left meanwhile."""
        await trio.lowlevel.checkpoint()
        if (size := reading_work(message)) < OFFLOAD_SIZE_MIN:
            return self._parse(message, fields)
        owner, event = (self.key or self.gateway.keys.anonymous).name, None
        try:
            with self.while_open():
                event = await self.gateway.runtime.run_in_thread(
                    lambda: self._parse(message, fields), owner=owner, size=size
                )
        except RequestError as error:
            # Too many texts wait for the threads.
            return error
        return event
