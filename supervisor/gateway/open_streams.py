"""The streamed responses of a gateway, and what they send while there is nothing to send.

A proxy in front ends a response of which nothing has come for a while, mostly for 60 s. So the head of a stream leaves
at the latest `HEAD_WITHIN_S` after its admission, or `keepalive_s` if that is shorter, without waiting for the first
token; and behind the head a comment leaves whenever nothing else was sent for `keepalive_s`. One task looks at all
streams of a gateway, a few times in `keepalive_s`. It learns from the bytes that an outbox has accepted whether
anything was sent since it last looked, so a token costs nothing here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio
from attrs import define, field

from supervisor.gateway.outbox import Outbox
from supervisor.gateway.request_record import RequestRecord

log = logging.getLogger(__name__)

HEAD_WITHIN_S = 5.0
KEEPALIVE_S = 15.0  # the default of `[gateway] keepalive_s`
COMMENT = b": keep-alive\n\n"  # readers of server-sent events ignore it (WHATWG HTML, 9.2.6)
LOOKS = 8  # in `keepalive_s`: so much later than due a comment may be
LOOK_S_MIN = 0.01
LOOKS_A_TURN = 32  # streams, about 2 ms where all send something; other tasks run between


class EventStream(Protocol):
    """A response of server-sent events, as its connection writes it."""

    outbox: Outbox

    @property
    def begun(self) -> bool:
        """Whether the head has been written."""

    def begin_stream(self) -> None:
        """Write the head alone."""

    def stream(self, events: bytes) -> None:
        """Write whole events or comments."""


@define(eq=False)
class OpenStream:
    """A stream that has not ended, and when it last sent anything."""

    response: EventStream
    record: RequestRecord
    accepted_bytes: int = -1  # of its outbox, at the last look
    quiet_since: float = 0.0  # the time of the first look that saw so many


@define(eq=False)
class OpenStreams:
    """All streams of a gateway that have not ended; without any, its task sleeps."""

    keepalive_s: Callable[[], float]  # 0: no comments
    _open: set[OpenStream] = field(factory=set)
    _added: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _any: bool = False  # a stream was added since the last look

    def add(self, response: EventStream, record: RequestRecord) -> OpenStream:
        """Look after a stream until `remove`."""
        stream = OpenStream(response, record)
        self._open.add(stream)
        if not self._any:
            self._any = True
            self._added.unpark_all()
        return stream

    def remove(self, stream: OpenStream) -> None:
        """Leave a stream alone from now on."""
        self._open.discard(stream)

    async def run(self) -> None:
        """Look after all streams until cancelled."""
        while True:
            # Streams may be short and follow each other quickly: this task is not woken for each.
            if not (self._open or self._any):
                await self._added.park()
            self._any = False
            await trio.sleep_until(await self._look(trio.current_time()))

    async def _look(self, now: float) -> float:
        """Send what is due, and return the time of the next look."""
        keepalive_s = self.keepalive_s()
        next_at = now + (min(HEAD_WITHIN_S, max(keepalive_s / LOOKS, LOOK_S_MIN)) if keepalive_s else HEAD_WITHIN_S)
        for place, stream in enumerate(tuple(self._open), 1):
            if place % LOOKS_A_TURN == 0:
                await trio.lowlevel.checkpoint()
            if stream not in self._open:  # it has ended meanwhile
                continue
            try:
                next_at = min(next_at, _look_after(stream, now, keepalive_s))
            except trio.BrokenResourceError:
                # Its connection sees the end, too.
                self.remove(stream)
            except Exception:
                log.exception("a bug ended the comments of a stream")
                self.remove(stream)
        return next_at


def _look_after(stream: OpenStream, now: float, keepalive_s: float) -> float:
    """Send the head or a comment if it is due; return the time until which the stream needs no look."""
    response, outbox = stream.response, stream.response.outbox
    if not response.begun:
        if (admitted_at := stream.record.admitted_at) is None:
            return now + HEAD_WITHIN_S
        if now < (due_at := admitted_at + min(HEAD_WITHIN_S, keepalive_s or HEAD_WITHIN_S)):
            return due_at
        response.begin_stream()
    elif outbox.accepted_bytes == stream.accepted_bytes and not outbox.backlog_bytes:
        if not keepalive_s or now < stream.quiet_since + keepalive_s:
            return now + HEAD_WITHIN_S
        response.stream(COMMENT)
    stream.accepted_bytes, stream.quiet_since = outbox.accepted_bytes, now
    return now + HEAD_WITHIN_S
