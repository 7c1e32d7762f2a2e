"""The writer of a link: one task that writes what is queued, whole messages at a time.

Frames are queued synchronously, by any task and in any state: a sender never waits, which is what makes sending legal
in a task that has been cancelled. What bounds the queue is the credit of the other end, and `queued_bytes_max` for an
end that reads nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio
from attrs import define, field

from protocol.errors import LocalViolation, PeerViolation
from protocol.frames import Frame
from protocol.peer import MESSAGE_BYTES_MAX, Peer
from supervisor.links.traffic import Traffic
from supervisor.links.transport import Transport


class Send(Protocol):
    """`FrameWriter.send`, as the halves of a link have it."""

    def __call__(self, frame: Frame, attached: tuple[memoryview, ...] = ...) -> None:
        """Queue a frame and the bytes that are attached to it."""


@define(eq=False)
class FrameWriter:
    """Queues the frames of one end of a link and writes them to its transport."""

    peer: Peer
    transport: Transport
    traffic: Traffic
    queued_bytes_max: int
    on_failure: Callable[[PeerViolation | LocalViolation], None]  # ends the link
    closed: bool = False  # the link has ended, and nothing may be sent any more
    last_sent_at: float = field(factory=trio.current_time)  # on Trio's clock
    _waiting: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def send(self, frame: Frame, attached: tuple[memoryview, ...] = ()) -> None:
        """Queue a frame and what is attached to it, or do nothing if the link has ended.

        Raises `TooLarge` or `Overloaded` as `Peer.send` does. A frame that is not legal ends the link.
        """
        if self.closed:
            return
        try:
            self.peer.send(frame, attached)
        except LocalViolation as error:
            self.on_failure(error)
            return
        self._waiting.unpark()
        if self.peer.queued_bytes > self.queued_bytes_max:  # the fault of the other end, not of this sender
            self.on_failure(PeerViolation(f"the other end left {self.peer.queued_bytes} bytes unread"))

    def wake(self) -> None:
        """Write frames that what has arrived has made ready."""
        self._waiting.unpark()

    async def run(self) -> None:
        """Write until the transport breaks, which the link's reader notices as well."""
        while True:
            try:
                while self.peer.ready and (data := self.peer.data_to_send(MESSAGE_BYTES_MAX)):
                    await self.transport.send_all(data)
                    self.last_sent_at = trio.current_time()
                    self.traffic.sent(len(data))
            except trio.BrokenResourceError:
                return
            except LocalViolation as error:
                self.on_failure(error)
                return
            await self._waiting.park()
