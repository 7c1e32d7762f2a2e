"""Counting of a WebSocket's frames and messages before the library reads them (RFC 6455, section 5).

An empty frame costs as much to read as a long one, so what may be read in a turn is bounded by frames, not by bytes.
And a message is stored by the library until it is whole and by this server until it is parsed, so its bytes must be
counted as they come. The library offers neither count: by the time it returns a message it has read everything.
"""

from __future__ import annotations

from attrs import define, field

HEAD_BYTES = 2
MASK_BYTES = 4
FINAL, OPCODE = 0x80, 0x0F  # of the first byte of a head
CONTROL = 0x08  # opcodes from here on are control frames, such as pings
LONGER = {126: 2, 127: 8}  # bytes of a longer length behind the first two of a head


@define(eq=False)
class FrameCounter:
    """Counts a client's frames, and the bytes of its messages, in a byte stream that comes in pieces of any size."""

    kept_bytes: int = 0  # of messages that have been received, in part or as a whole, and not been taken

    _head: bytearray = field(factory=bytearray)  # the received part of the head of the next frame
    _left_bytes: int = 0  # of the payload of the current frame
    _first_byte: int = 0  # of the head of the current frame
    _partial_bytes: int = 0  # of the message of which a part has been received
    _whole: list[int] = field(factory=list)  # the size of each whole message that has not been taken: a few

    def feed(self, data: bytes | bytearray, frames_max: int) -> tuple[int, int]:
        """Return how many bytes of `data` may be read, and how many frames begin in them, at most `frames_max`."""
        offset, frames, end = 0, 0, len(data)
        while offset < end:
            if self._left_bytes:
                skipped = min(self._left_bytes, end - offset)
                self._left_bytes -= skipped
                offset += skipped
                self._count(skipped)
                continue
            if not self._head:
                if frames == frames_max:
                    break
                frames += 1
            size = self._head_bytes()
            if len(self._head) < size:
                more = data[offset : offset + size - len(self._head)]
                self._head += more
                offset += len(more)
            if len(self._head) == self._head_bytes():
                self._first_byte, self._left_bytes = self._head[0], self._payload_bytes()
                self._head.clear()
                self._count(0)
        return offset, frames

    def message_taken(self) -> int:
        """Count the oldest whole message as taken, and return its size in bytes."""
        size = self._whole.pop(0)
        self.kept_bytes -= size
        return size

    def _count(self, payload_bytes: int) -> None:
        """Count `payload_bytes` more of the current frame, and its message if that ends there."""
        if self._first_byte & OPCODE >= CONTROL:
            return
        self._partial_bytes += payload_bytes
        self.kept_bytes += payload_bytes
        if not self._left_bytes and self._first_byte & FINAL:
            self._whole.append(self._partial_bytes)
            self._partial_bytes = 0

    def _head_bytes(self) -> int:
        """Return the length of the head, as far as the received bytes of it show."""
        if len(self._head) < HEAD_BYTES:
            return HEAD_BYTES
        masked = self._head[1] & 0x80
        return HEAD_BYTES + LONGER.get(self._head[1] & 0x7F, 0) + (MASK_BYTES if masked else 0)

    def _payload_bytes(self) -> int:
        short = self._head[1] & 0x7F
        longer = LONGER.get(short)
        return short if longer is None else int.from_bytes(self._head[HEAD_BYTES : HEAD_BYTES + longer], "big")
