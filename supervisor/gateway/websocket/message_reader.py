"""Messages of one WebSocket, read in their order, while the socket itself is read on.

A long message is read in a thread, and threads may be busy with others' texts. If its socket waited for that, pings
behind it would have no answer and a cancel no effect. So what comes meanwhile waits here, up to a limit, and what comes
beyond it is refused. A cancel of something that runs waits for nobody.
"""

from __future__ import annotations

from collections import deque
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
from supervisor.gateway.keys import Key
from supervisor.gateway.memory_budgets import MemoryReservation
from supervisor.gateway.requests import NO_MEMORY

Event: TypeAlias = "responses.Create | responses.CancelResponse"
Data: TypeAlias = dict[str, object]

MESSAGE_BYTES_FREE = 1024  # of each that waits, so that small ones are kept whatever else is


@define(eq=False)
class MessageReader:
    """Reads messages, and hands each to `hear` with its data and size, or with what is wrong with it.

    `at_once` says whether an event may pass those that wait; `lost` hears why the client could not be told something.
    """

    door: Gateway
    key: Key | None
    model: str | None  # what a request asks for that names none
    while_open: Callable[[], AbstractContextManager[None]]  # leaves its body when the client leaves
    hear: Callable[[Event | RequestError, Data, int], None]
    at_once: Callable[[Event], bool]
    lost: Callable[[Exception], None]
    at_rest: Callable[[], None]  # called when nothing waits to be read any more
    tasks: trio.Nursery
    _waiting: deque[tuple[str, MemoryReservation]] = field(factory=deque)

    @property
    def busy(self) -> bool:
        """Whether a message waits, or is being read."""
        return bool(self._waiting)

    def take(self, message: str) -> None:
        """Hear a message in the turn in which it came, or after those before it if it, or one of those, is long."""
        short, data = reading_work(message) < OFFLOAD_SIZE_MIN, Data()
        event = self._read(message, data) if short else None
        passes = not self._waiting or (not isinstance(event, RequestError | None) and self.at_once(event))
        if event is not None and passes:
            self.hear(event, data, message.__sizeof__())
            return
        many = len(self._waiting)
        if many > self.door.limits.websocket_queue_max:
            self.hear(Overloaded(f"{many} messages wait to be read on this connection"), data, 0)
            return
        held = self.door.bodies.hold(self.door.memory_owner(self.key), MESSAGE_BYTES_FREE)
        try:
            held.grow(message.__sizeof__())
        except Overloaded as error:
            self.hear(error, data, 0)
            return
        self._waiting.append((message, held))
        if not many:
            self.tasks.start_soon(self._read_on)

    def _read(self, message: str, data: Data) -> Event | RequestError:
        """Return what a message says, or what is wrong with it, putting it into `data`."""
        try:
            data.update(decode(message))
            return responses.read_event(data, default_model=self.model)
        except RequestError as error:
            return error
        except MemoryError:
            return Overloaded(NO_MEMORY)

    async def _read_on(self) -> None:
        """Hear what waits, in its order; it counts as waiting until it has been read."""
        try:
            while self._waiting:
                message, held = self._waiting[0]
                data = Data()
                event = await self._read_long(message, data)
                self._waiting.popleft()
                held.release()
                if event is None:
                    return
                self.hear(event, data, message.__sizeof__())
        except (SlowClient, trio.BrokenResourceError) as error:
            self.lost(error)
        finally:
            while self._waiting:
                self._waiting.popleft()[1].release()
            self.at_rest()

    async def _read_long(self, message: str, data: Data) -> Event | RequestError | None:
        """Return the same, read aside if it is long; None if its client has left meanwhile."""
        await trio.lowlevel.checkpoint()
        if (size := reading_work(message)) < OFFLOAD_SIZE_MIN:
            return self._read(message, data)
        owner, event = (self.key or self.door.keys.anybody).name, None
        try:
            with self.while_open():
                event = await self.door.aside(lambda: self._read(message, data), owner=owner, size=size)
        except RequestError as error:  # threads have too much to do
            return error
        return event
