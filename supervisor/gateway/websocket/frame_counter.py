"""Where frames and messages of a WebSocket begin and end (RFC 6455, section 5).

An empty frame costs as much to read as a long one, and a message is kept until it is whole and has been taken.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field

HEAD_BYTES = 2
MASK_BYTES = 4
FINAL, OPCODE = 0x80, 0x0F  # of the first byte of a head
CONTROL = 0x08  # the opcodes from here on are of no message: pings, say
LONGER = {126: 2, 127: 8}  # bytes of a length that does not fit into the head


@define(eq=False)
class FrameCounter:
    """Counts a client's frames, and the bytes of its messages, as its bytes come, in pieces of any size."""

    kept_bytes: int = 0  # of messages that have come and were not taken, the one that has come in part included

    _head: bytearray = field(factory=bytearray)  # of a frame whose head has come in part
    _left_bytes: int = 0  # of the payload of a frame that has begun
    _first: int = 0  # the first byte of its head
    _part_bytes: int = 0  # of the message that has come in part
    _whole: deque[int] = field(factory=deque)  # the bytes of each message that is whole and was not taken

    def take(self, data: bytes | bytearray, frames_max: int) -> tuple[int, int]:
        """Return how many bytes to read on, and how many frames begin in them, of which there are at most so many."""
        at, frames, end = 0, 0, len(data)
        while at < end:
            if self._left_bytes:
                skipped = min(self._left_bytes, end - at)
                self._left_bytes -= skipped
                at += skipped
                self._note(skipped)
                continue
            if not self._head:
                if frames == frames_max:
                    break
                frames += 1
            size = self._head_bytes()
            if len(self._head) < size:
                more = data[at : at + size - len(self._head)]
                self._head += more
                at += len(more)
            if len(self._head) == self._head_bytes():
                self._first, self._left_bytes = self._head[0], self._payload_bytes()
                self._head.clear()
                self._note(0)
        return at, frames

    def message_taken(self) -> int:
        """Note that the oldest message that is whole was taken, and return its bytes."""
        size = self._whole.popleft()
        self.kept_bytes -= size
        return size

    def _note(self, payload_bytes: int) -> None:
        """Count so many more bytes of the frame that comes now, and the end of its message if it is there."""
        if self._first & OPCODE >= CONTROL:
            return
        self._part_bytes += payload_bytes
        self.kept_bytes += payload_bytes
        if not self._left_bytes and self._first & FINAL:
            self._whole.append(self._part_bytes)
            self._part_bytes = 0

    def _head_bytes(self) -> int:
        """Return how long the head is, as far as can be told yet."""
        if len(self._head) < HEAD_BYTES:
            return HEAD_BYTES
        masked = self._head[1] & 0x80
        return HEAD_BYTES + LONGER.get(self._head[1] & 0x7F, 0) + (MASK_BYTES if masked else 0)

    def _payload_bytes(self) -> int:
        short = self._head[1] & 0x7F
        longer = LONGER.get(short)
        return short if longer is None else int.from_bytes(self._head[HEAD_BYTES : HEAD_BYTES + longer], "big")
