"""The writer of a link: one task that writes the queue, whole messages at a time.

Frames are queued synchronously, by any task and in any state: a sender never waits, so sending is legal in a cancelled
task. The queue is bounded by the credit of the other end, and by `queued_bytes_max` for an end that reads nothing.

Tokens are the exception: tokens of all streams are gathered until the writer runs, and leave as one `Step`, at a
fraction of the price of a frame each. Every other frame is queued behind the gathered tokens, so the frames of a stream
keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio
from attrs import define, field

from protocol.byte_budget import ByteShare
from protocol.errors import LocalViolation, PeerViolation
from protocol.link.attachments import Views
from protocol.link.frames import STEP_TOKENS_MAX, Frame, Step
from protocol.link.peer import MESSAGE_BYTES_MAX, Peer
from supervisor.links.traffic import Traffic
from supervisor.links.transport import Transport


def _no_tokens() -> Step:
    return Step([], [], [], [], [])


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
    _gathered: Step = field(factory=_no_tokens, init=False)

    def send(self, frame: Frame, attached: Views = (), share: ByteShare | None = None) -> None:
        """Queue a frame and its attachment, or do nothing if the link has ended.

        Raises `TooLarge` or `Overloaded` as `Peer.send` does. An illegal frame ends the link.
        """
        if self._gathered.tokens:
            self._send_gathered()
        self._send(frame, attached, share)

    def send_tokens(self, stream: int, ids: Sequence[int]) -> bool:
        """Queue the next tokens of a stream, if they may be sent in a `Step`; return whether they may."""
        if not 0 < len(ids) <= STEP_TOKENS_MAX or not self.peer.takes_steps(stream):
            return False
        step = self._gathered
        if len(step.tokens) + len(ids) > STEP_TOKENS_MAX:
            self._send_gathered()
            step = self._gathered
        if not step.tokens:
            self.wake()
        step.streams.append(stream)
        step.counts.append(len(ids))
        step.tokens.extend(ids)
        return True

    def _send_gathered(self) -> None:
        step, self._gathered = self._gathered, _no_tokens()
        self._send(step)

    def _send(self, frame: Frame, attached: Views = (), share: ByteShare | None = None) -> None:
        if self.closed:
            return
        try:
            self.peer.send(frame, attached, share)
        except LocalViolation as error:
            self.on_failure(error)
            return
        self.wake()
        if self.peer.queued_bytes > self.queued_bytes_max:  # the fault of the other end, not of this sender
            self.on_failure(PeerViolation(f"the other end left {self.peer.queued_bytes} bytes unread"))

    def wake(self) -> None:
        """Wake the writer, for frames that the peer has queued by itself."""
        if self._waiting:  # else the writer is awake already
            self._waiting.unpark()

    async def run(self) -> None:
        """Write until the transport breaks; the link's reader then ends the link."""
        while True:
            try:
                while data := self._next_data():
                    await self.transport.send_all(data)
                    self.last_sent_at = trio.current_time()
                    self.traffic.sent(len(data))
            except trio.BrokenResourceError:
                return
            except LocalViolation as error:
                self.on_failure(error)
                return
            await self._waiting.park()

    def _next_data(self) -> bytes:
        if self._gathered.tokens:
            self._send_gathered()
        return self.peer.data_to_send(MESSAGE_BYTES_MAX) if self.peer.ready else b""
