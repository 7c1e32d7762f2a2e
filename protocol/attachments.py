"""Attachments of requests and replies: long bodies that are sent in pieces, so that they do not delay short frames.

Pieces of several streams take turns, and the number of bytes in flight is limited: nothing can overtake what has been
sent, so that a token would have to wait for every byte of attachments in a socket's buffer.

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
class _Unsent:
    """The unsent attachment of one stream, and the frames of the stream that wait behind it."""

    buffers: deque[memoryview]
    size: int  # of the attachment of the frame that has been sent
    behind: deque[tuple[Item | End, Views]] = Factory(deque)  # frames that wait, with their attachments
    ended: bool = False  # whether an `End` is among them

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

    def next_frames(self) -> list[Item | End]:
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
        self.promised_bytes = 0  # of all attachments whose last piece has not been sent
        self.in_flight_bytes = 0  # sent, and not yet acknowledged
        self._unsent: OrderedDict[Key, _Unsent] = OrderedDict()  # in the order of their turns
        self.behind_bytes = 0
        """Bytes of frames that wait behind attachments."""

    def __len__(self) -> int:
        """Return the number of streams with unsent attachments."""
        return len(self._unsent)

    def __contains__(self, key: Key) -> bool:
        """Return whether a stream has unsent bytes."""
        return key in self._unsent

    @property
    def ready(self) -> bool:
        """Whether a piece may be sent now."""
        return bool(self._unsent) and self.in_flight_bytes < WINDOW_BYTES

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
        if self.promised_bytes + size > self._bytes_max:
            raise Overloaded(
                f"{self.promised_bytes} attached bytes are waiting on this link, which takes {self._bytes_max}"
            )
        return views

    def put(self, key: Key, views: Views) -> None:
        """Queue the attachment of a frame that has just been sent."""
        unsent = self._unsent[key] = _Unsent(deque(views), _size(views))
        self.promised_bytes += unsent.size

    def put_behind(self, key: Key, frame: Item | End, views: Views) -> None:
        """Keep a frame until the attachment before it has been sent."""
        unsent = self._unsent[key]
        unsent.behind.append((frame, views))
        unsent.ended = isinstance(frame, End)
        self.promised_bytes += _size(views)
        self.behind_bytes += len(frame.body)

    def ended(self, key: Key) -> bool:
        """Return whether the stream's `End` waits here."""
        return key in self._unsent and self._unsent[key].ended

    def drop(self, key: Key) -> None:
        """Discard the attachments and frames of a stream that ended early."""
        if (unsent := self._unsent.pop(key, None)) is not None:
            self.promised_bytes -= unsent.size + sum(_size(views) for _, views in unsent.behind)
            self.behind_bytes -= sum(len(frame.body) for frame, _ in unsent.behind)

    def next_piece(self, size_max: int) -> tuple[Key, bytes, list[Item | End]]:
        """Remove and return the next bytes of the stream whose turn it is, with the frames that may follow them."""
        key, unsent = next(iter(self._unsent.items()))
        data = unsent.cut(min(size_max, WINDOW_BYTES - self.in_flight_bytes))
        self.in_flight_bytes += len(data)
        frames: list[Item | End] = []
        if not unsent.buffers:
            self.promised_bytes -= unsent.size
            frames = unsent.next_frames()
            self.behind_bytes -= sum(len(frame.body) for frame in frames)
        if unsent.buffers:
            self._unsent.move_to_end(key)
        else:
            del self._unsent[key]
        return key, data, frames

    def acknowledge(self, size: int) -> None:
        """Reopen the window by `size` bytes, which the other end has received."""
        if not 0 < size <= self.in_flight_bytes:
            raise PeerViolation(f"room for {size} attached bytes, of {self.in_flight_bytes} on their way")
        self.in_flight_bytes -= size


class Incoming:
    """The attachments that one end is receiving, each with the frame that it belongs to."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.promised_bytes = 0  # of all incomplete attachments, arrived or not
        # A frame, and the bytes of its attachment so far.
        self._incomplete: dict[Key, tuple[Open | Item, bytearray]] = {}
        self.unacknowledged_bytes = 0
        """Bytes received since the last `WindowUpdate`."""

    def expect(self, key: Key, frame: Open | Item) -> None:
        """Expect the attachment of a frame; raises `PeerViolation` if it is more than this end can hold."""
        size = frame.attached
        if self.promised_bytes + size > self._bytes_max:
            raise PeerViolation(
                f"{size} attached bytes, and {self.promised_bytes} of others; the limit is {self._bytes_max}"
            )
        self.promised_bytes += size
        self._incomplete[key] = frame, bytearray()  # no larger than what came, whatever size was announced

    def add_piece(self, key: Key, data: bytes) -> tuple[Open | Item, memoryview] | None:
        """Add a stream's next bytes, which its state allows; return the frame that they complete, if they do.

        Raises `PeerViolation` for bytes beyond the window.
        """
        self.unacknowledged_bytes += len(data)
        if self.unacknowledged_bytes > WINDOW_BYTES:
            raise PeerViolation(f"{self.unacknowledged_bytes} attached bytes on their way; the limit is {WINDOW_BYTES}")
        if key not in self._incomplete:  # its stream was cancelled
            return None
        frame, buffer = self._incomplete[key]
        buffer += data
        if len(buffer) < frame.attached:
            return None
        self.drop(key)
        return frame, memoryview(buffer).toreadonly()

    def grant(self, key: Key, units: int) -> bool:
        """Add credit to a request that is incomplete; return whether there was one."""
        if key not in self._incomplete:
            return False
        frame, buffer = self._incomplete[key]
        assert isinstance(frame, Open)
        self._incomplete[key] = evolve(frame, credit=frame.credit + units), buffer
        return True

    @property
    def buffered_bytes(self) -> int:
        """Bytes of incomplete attachments that have arrived."""
        return sum(len(buffer) for _, buffer in self._incomplete.values())

    def drop(self, key: Key) -> bool:
        """Discard an attachment that is complete or was cancelled; return whether there was one."""
        incomplete = self._incomplete.pop(key, None)
        if incomplete is not None:
            self.promised_bytes -= incomplete[0].attached
        return incomplete is not None


def _size(views: Views) -> int:
    return sum(map(len, views))
