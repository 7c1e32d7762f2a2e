"""Attachments of requests and replies: long bodies, sent in pieces so that they do not delay short frames.

Streams take turns, one piece each, and a window limits the bytes in flight: a token waits behind every byte of
attachments in the socket's buffer.

The receiver never holds more than the sender counts. The sender counts an attachment until its last piece is sent or
its stream is cancelled; the receiver, until that piece has arrived or the cancellation is sent. So a sender within the
receiver's limit never exceeds it. An attachment without room waits, first come, first served, and so do the later
frames of its stream.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from attrs import Factory, define, evolve, frozen

from protocol.byte_budget import ByteBudget, ByteShare
from protocol.errors import PeerViolation, TooLarge
from protocol.link.frames import End, Item, Open

PIECE_BYTES = 64 * 1024
"""The most attached bytes in one message."""

WINDOW_BYTES = 4 * PIECE_BYTES
"""The most attached bytes in flight in each direction."""

StreamKey: TypeAlias = tuple[bool, int]
"""Whether this end opened the stream, and its number."""

Views: TypeAlias = tuple[memoryview, ...]


@frozen
class _Held:
    """A frame behind an attachment of its stream, or without room for its own attachment."""

    frame: Item | End
    views: Views
    share: ByteShare | None  # room for its attachment, if it has one

    @property
    def may_be_sent(self) -> bool:
        return self.share is None or self.share.taken


@define(eq=False)
class _Unsent:
    """The unsent attachment of one stream, and the held frames behind it."""

    buffers: deque[memoryview] = Factory(deque)
    share: ByteShare | None = None  # room for `buffers`
    held: deque[_Held] = Factory(deque)
    ended: bool = False  # whether `held` has an `End`

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
        """Return the frames to send after the last byte, up to the next one with an attachment of its own."""
        frames: list[Item | End] = []
        while self.held and not self.buffers and self.held[0].may_be_sent:
            held = self.held.popleft()
            frames.append(held.frame)
            if held.share is not None:
                self.buffers.extend(held.views)
                self.share = held.share
        return frames

    def shares(self) -> list[ByteShare]:
        """Return the shares of all attachments of the stream."""
        return [share for share in (self.share, *(held.share for held in self.held)) if share is not None]


class Outgoing:
    """The unsent attachments of one end of a link; later frames of their streams wait behind them.

    An attachment takes room in `budget` when its turn has come, and gives it back with its last piece.
    """

    def __init__(self, bytes_max: int) -> None:
        self.budget = ByteBudget(bytes_max)
        self.in_flight_bytes = 0  # sent, and not yet acknowledged
        self.unsent: dict[StreamKey, _Unsent] = {}
        # Round robin: the streams with bytes to send, the next stream first.
        self._turns: OrderedDict[StreamKey, None] = OrderedDict()
        self.held_bytes = 0
        """Bytes of held frames, without their attachments."""

    @property
    def ready(self) -> bool:
        """Whether a piece may be sent now."""
        return bool(self._turns) and self.in_flight_bytes < WINDOW_BYTES

    def fit(self, size: int, attached: Views) -> Views:
        """Check an attachment and return it as flat, non-empty buffers; changes nothing.

        Raises `TooLarge` for more bytes than may ever be attached, `PeerViolation` if there are not `size` bytes.
        """
        views = tuple(view.cast("B") for view in attached if view.nbytes)
        if (total := sum(map(len, views))) != size:
            raise PeerViolation(f"{total} bytes are attached to a frame that says {size}")
        self.check_size(size)
        return views

    def check_size(self, size: int) -> None:
        """Raise `TooLarge` for more bytes than may ever be attached."""
        if size > self.budget.bytes_max:
            raise TooLarge(f"{size} bytes are attached; the limit of a link is {self.budget.bytes_max}")

    def put(self, key: StreamKey, views: Views, share: ByteShare) -> None:
        """Queue the attachment of a frame that has just been sent; its room has been taken."""
        self.unsent[key] = _Unsent(deque(views), share)
        self._turns[key] = None

    def hold(self, key: StreamKey, frame: Item | End, views: Views, share: ByteShare | None) -> None:
        """Keep a frame until the attachment before it has been sent, and there is room for its own."""
        unsent = self.unsent.setdefault(key, _Unsent())
        unsent.held.append(_Held(frame, views, share))
        unsent.ended = isinstance(frame, End)
        self.held_bytes += len(frame.body)

    def next_frames(self, key: StreamKey) -> list[Item | End]:
        """Remove and return the sendable frames of a stream, and queue the attachment of the last frame."""
        if (unsent := self.unsent.get(key)) is None or unsent.buffers:
            return []
        frames = unsent.next_frames()
        self.held_bytes -= sum(len(frame.body) for frame in frames)
        if unsent.buffers:
            self._turns[key] = None
        elif not unsent.held:
            del self.unsent[key]
        return frames

    def ended(self, key: StreamKey) -> bool:
        """Return whether the stream's `End` waits here."""
        return key in self.unsent and self.unsent[key].ended

    def drop(self, key: StreamKey) -> None:
        """Discard the attachments and frames of a stream that ended early."""
        if (unsent := self.unsent.pop(key, None)) is not None:
            self._turns.pop(key, None)
            self.held_bytes -= sum(len(held.frame.body) for held in unsent.held)
            for share in unsent.shares():
                share.give_back()

    def next_piece(self, size_max: int) -> tuple[StreamKey, bytes]:
        """Remove and return the next bytes of the stream whose turn it is."""
        key = next(iter(self._turns))
        unsent = self.unsent[key]
        data = unsent.cut(min(size_max, WINDOW_BYTES - self.in_flight_bytes))
        self.in_flight_bytes += len(data)
        if unsent.buffers:
            self._turns.move_to_end(key)
        else:
            del self._turns[key]
        return key, data

    def piece_sent(self, key: StreamKey) -> None:
        """Give back the room of a stream's attachment after its last piece.

        Not earlier: the next attachment in that room must follow the piece.
        """
        unsent = self.unsent[key]
        if not unsent.buffers and unsent.share is not None:
            share, unsent.share = unsent.share, None
            share.give_back()

    def acknowledge(self, size: int) -> None:
        """Reopen the window by `size` bytes received at the other end."""
        if not 0 < size <= self.in_flight_bytes:
            raise PeerViolation(f"room for {size} attached bytes, of {self.in_flight_bytes} on their way")
        self.in_flight_bytes -= size


class Incoming:
    """The incomplete attachments on one end of a link, each with its frame."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.promised_bytes = 0  # the sizes of all incomplete attachments
        # A frame, and the bytes of its attachment so far.
        self._incomplete: dict[StreamKey, tuple[Open | Item, bytearray]] = {}
        self.unacknowledged_bytes = 0
        """Bytes received since the last `WindowUpdate`."""

    def expect(self, key: StreamKey, frame: Open | Item) -> None:
        """Expect the attachment of a frame; raises `PeerViolation` if it is more than this end can hold."""
        size = frame.attached
        if self.promised_bytes + size > self._bytes_max:
            raise PeerViolation(
                f"{size} attached bytes, and {self.promised_bytes} of others; the limit is {self._bytes_max}"
            )
        self.promised_bytes += size
        # The buffer grows with the bytes that arrive: a peer may announce a size and send nothing.
        self._incomplete[key] = frame, bytearray()

    def add_piece(self, key: StreamKey, data: bytes) -> tuple[Open | Item, memoryview] | None:
        """Add a stream's next bytes; return the frame and its attachment if they complete it.

        The state of the stream allows them. Raises `PeerViolation` for bytes beyond the window.
        """
        self.unacknowledged_bytes += len(data)
        if self.unacknowledged_bytes > WINDOW_BYTES:
            raise PeerViolation(f"{self.unacknowledged_bytes} attached bytes on their way; the limit is {WINDOW_BYTES}")
        if key not in self._incomplete:  # a cancelled stream
            return None
        frame, buffer = self._incomplete[key]
        buffer += data
        if len(buffer) < frame.attached:
            return None
        self.drop(key)
        return frame, memoryview(buffer).toreadonly()

    def grant(self, key: StreamKey, units: int) -> bool:
        """Add credit to an incomplete request; return whether there was one."""
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

    def drop(self, key: StreamKey) -> bool:
        """Discard a complete or cancelled attachment; return whether there was one."""
        incomplete = self._incomplete.pop(key, None)
        if incomplete is not None:
            self.promised_bytes -= incomplete[0].attached
        return incomplete is not None
