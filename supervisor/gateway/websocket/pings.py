"""When a quiet WebSocket is pinged, and when its client counts as gone. No I/O: the session asks, and sends.

A client whose machine or network is gone sends no end, and its responses would run on. So after `PING_AFTER_S`
without a byte from it the client is pinged; any byte is an answer. How long one may take depends on what an honest
client can be doing:

- While it is being answered, it reads. Its library answers pings as soon as it reads them, and they are behind
  everything that was sent before: so a slow reader has as much longer as those bytes take at `READ_BYTES_S`.
  Each ping names its place in what was sent, and its pong returns it: so far the client has read.
- Otherwise it may be doing something else, such as running a tool, and synchronous clients read nothing meanwhile.

A client that reads nothing at all has a backlog soon, and is dropped by `stall_s`.
"""

from __future__ import annotations

import struct
from math import inf

from attrs import define

from supervisor.gateway.websocket.frames import ping_frame

PING_AFTER_S = 20.0  # without a byte from the client, and as long after each ping
ANSWERED_SILENT_S = 60.0  # without a byte from a client that is being answered
IDLE_SILENT_S = 300.0  # without a byte from any other
READ_BYTES_S = 1024  # the slowest reading that a pong is waited for
PLACE = struct.Struct(">Q")


@define(eq=False)
class Pings:
    """The pings of one WebSocket, by `trio.current_time` and by the bytes that its outbox has accepted."""

    read_bytes: int = 0  # of everything that was sent, by the last pong
    _pinged_at: float = -inf
    _place: int = 0  # of the last ping
    _unread_bytes: int = 0  # that the client may not have read when the first ping came that nothing has answered

    def due_at(self, received_at: float) -> float:
        """Return when to ping a client from which the last byte came at `received_at`."""
        return max(received_at, self._pinged_at) + PING_AFTER_S

    def gone_at(self, received_at: float, *, answered: bool) -> float:
        """Return when the client counts as gone, unless a byte comes before."""
        if self._pinged_at < received_at:
            # It has not been asked.
            return inf
        return received_at + (ANSWERED_SILENT_S if answered else IDLE_SILENT_S) + self._unread_bytes / READ_BYTES_S

    def ping(self, now: float, received_at: float, place: int) -> bytes:
        """Return the frame of the next ping, which has `place` bytes before it."""
        if self._pinged_at < received_at:
            self._unread_bytes = place - self.read_bytes
        self._pinged_at, self._place = now, place
        return ping_frame(PLACE.pack(place))

    def ponged(self, payload: bytes) -> None:
        """Take a pong, unless it answers no ping of ours."""
        if len(payload) == PLACE.size and self.read_bytes <= (place := PLACE.unpack(payload)[0]) <= self._place:
            self.read_bytes = place
