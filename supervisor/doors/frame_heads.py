"""Where the frames of a WebSocket begin (RFC 6455, section 5.2): an empty one costs as much as a long one."""

from __future__ import annotations

from attrs import define, field

HEAD_BYTES = 2
MASK_BYTES = 4
LONGER = {126: 2, 127: 8}  # bytes of a length that does not fit into the head


@define(eq=False)
class FrameHeads:
    """Counts a client's frames as its bytes come, in pieces of any size."""

    _head: bytearray = field(factory=bytearray)  # of a frame whose head has come in part
    _left_bytes: int = 0  # of the payload of a frame that has begun

    def take(self, data: bytes | bytearray, frames_max: int) -> tuple[int, int]:
        """Return how many bytes to read on, and how many frames begin in them, of which there are at most so many."""
        at, frames, end = 0, 0, len(data)
        while at < end:
            if self._left_bytes:
                skipped = min(self._left_bytes, end - at)
                self._left_bytes -= skipped
                at += skipped
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
                self._left_bytes = self._payload_bytes()
                self._head.clear()
        return at, frames

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
