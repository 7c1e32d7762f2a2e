"""Attachments of requests and replies: long bodies that are sent in pieces, so that they do not delay short frames.

Pieces of several streams take turns, and the number of bytes in flight is limited: nothing can overtake what has been
sent, and a token behind a megabyte in a socket's buffer is late.

The receiver never holds more than the sender counts: the sender counts an attachment until its last piece has been
sent or its stream has been cancelled; the receiver until that piece has arrived or it has sent the cancellation. So a
sender that keeps its limit never exceeds the receiver's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from attrs import Factory, define, evolve

from protocol.errors import Overloaded, PeerViolation, TooLarge
from protocol.frames import End, Item, Open

PIECE_BYTES = 64 * 1024  # of attachments, in one message
WINDOW_BYTES = 4 * PIECE_BYTES  # in flight, in each direction
ATTACHED_BYTES_MAX = 512 * 1024 * 1024  # of all incomplete attachments, in each direction

Key: TypeAlias = tuple[bool, int]
"""Whether this end opened the stream, and its number."""

Views: TypeAlias = tuple[memoryview, ...]


@define(eq=False)
class _Line:
    """The unsent attachment of one stream, and the frames of the stream that wait behind it."""

    buffers: deque[memoryview]
    size: int  # of the attachment of the frame that has been sent
    behind: deque[tuple[Item | End, Views]] = Factory(deque)
    ended: bool = False  # an `End` is among them

    def cut(self, size_max: int) -> bytes:
        """Remove and return at most `size_max` bytes."""
        cut: list[memoryview] = []
        while self.buffers and size_max > 0:
            first = self.buffers.popleft()
            if len(first) > size_max:
                self.buffers.appendleft(first[size_max:])
            cut.append(first[:size_max])
            size_max -= len(cut[-1])
        return b"".join(cut)

    def step_up(self) -> list[Item | End]:
        """Return the frames that may be sent after the last byte: up to the next one with an attachment of its own."""
        frames: list[Item | End] = []
        while self.behind and not self.buffers:
            frame, views = self.behind.popleft()
            frames.append(frame)
            self.buffers.extend(views)
            self.size = _size(views)
        return frames


class Outgoing:
    """The unsent attachments of one end of a link; later frames of their streams wait behind them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0  # of all attachments whose last piece has not been sent
        self._on_way = 0
        self._lines: OrderedDict[Key, _Line] = OrderedDict()  # in the order of their turns
        self.behind_bytes = 0
        """Bytes of frames that wait behind attachments."""

    def __len__(self) -> int:
        """Return the number of streams with unsent attachments."""
        return len(self._lines)

    def __contains__(self, key: Key) -> bool:
        """Return whether a stream has unsent bytes."""
        return key in self._lines

    @property
    def ready(self) -> bool:
        """Whether a piece may be sent now."""
        return bool(self._lines) and self._on_way < WINDOW_BYTES

    def fit(self, size: int, attached: Views) -> Views:
        """Check an attachment and return it as flat, non-empty buffers; changes nothing.

        Raises `TooLarge` for more bytes than may ever be attached, `Overloaded` for more than may be now, and
        `PeerViolation` if there are not `size` bytes.
        """
        views = tuple(view.cast("B") for view in attached if view.nbytes)
        if _size(views) != size:
            raise PeerViolation(f"{_size(views)} bytes are attached to a frame that says {size}")
        if size > self._bytes_max:
            raise TooLarge(f"{size} bytes are attached; the limit of a link is {self._bytes_max}")
        if self._bytes + size > self._bytes_max:
            raise Overloaded(f"{self._bytes} attached bytes are waiting on this link, which takes {self._bytes_max}")
        return views

    def put(self, key: Key, views: Views) -> None:
        """Queue the attachment of a frame that has just been sent."""
        line = self._lines[key] = _Line(deque(views), _size(views))
        self._bytes += line.size

    def behind(self, key: Key, frame: Item | End, views: Views) -> None:
        """Keep a frame until the attachment before it has been sent."""
        line = self._lines[key]
        line.behind.append((frame, views))
        line.ended = isinstance(frame, End)
        self._bytes += _size(views)
        self.behind_bytes += len(frame.body)

    def ended(self, key: Key) -> bool:
        """Return whether the stream's `End` waits here."""
        return key in self._lines and self._lines[key].ended

    def drop(self, key: Key) -> None:
        """Discard the attachments and frames of a stream that ended early."""
        if (line := self._lines.pop(key, None)) is not None:
            self._bytes -= line.size + sum(_size(views) for _, views in line.behind)
            self.behind_bytes -= sum(len(frame.body) for frame, _ in line.behind)

    def piece(self, size_max: int) -> tuple[Key, bytes, list[Item | End]]:
        """Return the stream whose turn it is, its next bytes, and the frames that may follow them at once."""
        key, line = next(iter(self._lines.items()))
        data = line.cut(min(size_max, WINDOW_BYTES - self._on_way))
        self._on_way += len(data)
        frames: list[Item | End] = []
        if not line.buffers:
            self._bytes -= line.size
            frames = line.step_up()
            self.behind_bytes -= sum(len(frame.body) for frame in frames)
        if line.buffers:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        return key, data, frames

    def taken(self, size: int) -> None:
        """Note that the other end has received `size` bytes."""
        if not 0 < size <= self._on_way:
            raise PeerViolation(f"room for {size} attached bytes, of {self._on_way} on their way")
        self._on_way -= size


class Incoming:
    """The attachments that one end is receiving, each with the frame that it belongs to."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._coming: dict[Key, tuple[Open | Item, bytearray]] = {}  # a frame, and the bytes of its attachment so far
        self.taken = 0
        """Bytes received since the last `WindowUpdate`."""

    def expect(self, key: Key, frame: Open | Item) -> None:
        """Expect the attachment of a frame; raises `PeerViolation` if it is more than this end can hold."""
        size = frame.attached
        if self._bytes + size > self._bytes_max:
            raise PeerViolation(f"{size} attached bytes, and {self._bytes} of others; the limit is {self._bytes_max}")
        self._bytes += size
        self._coming[key] = frame, bytearray()  # grows as bytes come: to announce a size costs a liar nothing

    def piece(self, key: Key, data: bytes) -> tuple[Open | Item, memoryview] | None:
        """Add a stream's next bytes, which its state allows; return the frame that they complete, if they do.

        Raises `PeerViolation` for bytes beyond the window.
        """
        self.taken += len(data)
        if self.taken > WINDOW_BYTES:
            raise PeerViolation(f"{self.taken} attached bytes on their way; the limit is {WINDOW_BYTES}")
        if key not in self._coming:  # its stream was cancelled
            return None
        frame, buffer = self._coming[key]
        buffer += data
        if len(buffer) < frame.attached:
            return None
        self.drop(key)
        return frame, memoryview(buffer).toreadonly()

    def grant(self, key: Key, units: int) -> bool:
        """Add credit to a request that is incomplete; return whether there was one."""
        if key not in self._coming:
            return False
        frame, buffer = self._coming[key]
        assert isinstance(frame, Open)
        self._coming[key] = evolve(frame, credit=frame.credit + units), buffer
        return True

    def drop(self, key: Key) -> bool:
        """Discard an attachment that is complete or was cancelled; return whether there was one."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            self._bytes -= coming[0].attached
        return coming is not None


def _size(views: Views) -> int:
    return sum(map(len, views))
