"""What is attached to requests and replies, on its way in pieces: long bodies that must not delay short frames.

Pieces of several streams take turns, and only so many bytes are on their way at once: what has left cannot be overtaken
by anything, and a token behind a megabyte in a socket's buffer is late.

The receiver never holds more than the sender counts: the sender counts what is attached until its last piece has left,
or it has heard that nobody wants it; the receiver until that piece has come, or it has said so. So a sender that keeps
the limit never breaks the receiver's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from attrs import Factory, define, evolve

from protocol.errors import Overloaded, PeerViolation, TooLarge
from protocol.frames import End, Item, Open

PIECE_BYTES = 64 * 1024  # of what is attached, in one message
WINDOW_BYTES = 4 * PIECE_BYTES  # on their way at once, in each direction
ATTACHED_BYTES_MAX = 512 * 1024 * 1024  # of all that is not whole yet, in each direction

Key: TypeAlias = tuple[bool, int]
"""Whether this end opened the stream, and its number."""

Views: TypeAlias = tuple[memoryview, ...]


@define(eq=False)
class _Line:
    """What one stream has attached, and what it has said since."""

    buffers: deque[memoryview]
    size: int  # of what belongs to the frame that has left
    behind: deque[tuple[Item | End, Views]] = Factory(deque)
    ended: bool = False

    def cut(self, size_max: int) -> bytes:
        """Take off at most so many bytes."""
        cut: list[memoryview] = []
        while self.buffers and size_max > 0:
            first = self.buffers.popleft()
            if len(first) > size_max:
                self.buffers.appendleft(first[size_max:])
            cut.append(first[:size_max])
            size_max -= len(cut[-1])
        return b"".join(cut)

    def step_up(self) -> list[Item | End]:
        """Return what may leave now that all bytes have: up to the next frame that has some attached itself."""
        said: list[Item | End] = []
        while self.behind and not self.buffers:
            frame, views = self.behind.popleft()
            said.append(frame)
            self.buffers.extend(views)
            self.size = _size(views)
        return said


class Outgoing:
    """What one end has attached and not sent yet; what its stream says after it waits behind it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0  # of all that is attached to a frame whose last piece has not left
        self._on_way = 0
        self._lines: OrderedDict[Key, _Line] = OrderedDict()  # whose turn it is comes first
        self.behind_bytes = 0
        """How many bytes of frames wait behind attached ones."""

    def __len__(self) -> int:
        """How many streams have something to send."""
        return len(self._lines)

    def __contains__(self, key: Key) -> bool:
        """Whether bytes of a stream still wait."""
        return key in self._lines

    @property
    def ready(self) -> bool:
        """Whether a piece may leave now."""
        return bool(self._lines) and self._on_way < WINDOW_BYTES

    def fit(self, size: int, attached: Views) -> Views:
        """Return `attached` as plain bytes, none empty, after all checks; nothing else has happened if one fails.

        Raises `TooLarge` and `Overloaded` for more than can ever be attached, or can now, and `PeerViolation` if there
        are not `size` bytes.
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
        """Attach bytes to what a stream has just said."""
        line = self._lines[key] = _Line(deque(views), _size(views))
        self._bytes += line.size

    def behind(self, key: Key, frame: Item | End, views: Views) -> None:
        """Keep what a stream says next until its bytes have left."""
        line = self._lines[key]
        line.behind.append((frame, views))
        line.ended = isinstance(frame, End)
        self._bytes += _size(views)
        self.behind_bytes += len(frame.body)

    def ended(self, key: Key) -> bool:
        """Whether the stream's last word has been said, and waits."""
        return key in self._lines and self._lines[key].ended

    def drop(self, key: Key) -> None:
        """Forget a stream that has ended early."""
        if (line := self._lines.pop(key, None)) is not None:
            self._bytes -= line.size + sum(_size(views) for _, views in line.behind)
            self.behind_bytes -= sum(len(frame.body) for frame, _ in line.behind)

    def piece(self, size_max: int) -> tuple[Key, bytes, list[Item | End]]:
        """Return whose turn it is, its next bytes, and what may follow them at once."""
        key, line = next(iter(self._lines.items()))
        data = line.cut(min(size_max, WINDOW_BYTES - self._on_way))
        self._on_way += len(data)
        said: list[Item | End] = []
        if not line.buffers:
            self._bytes -= line.size
            said = line.step_up()
            self.behind_bytes -= sum(len(frame.body) for frame in said)
        if line.buffers:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        return key, data, said

    def taken(self, size: int) -> None:
        """Note that the other end has taken so many bytes."""
        if not 0 < size <= self._on_way:
            raise PeerViolation(f"room for {size} attached bytes, of {self._on_way} on their way")
        self._on_way -= size


class Incoming:
    """What one end is being sent, each with the frame that it belongs to."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._coming: dict[Key, tuple[Open | Item, bytearray]] = {}  # a frame, and what has come of its bytes
        self.taken = 0
        """How many bytes have come since the other end was last told so."""

    def expect(self, key: Key, frame: Open | Item) -> None:
        """Wait for what follows a frame; raises `PeerViolation` if that is more than this end can hold."""
        size = frame.attached
        if self._bytes + size > self._bytes_max:
            raise PeerViolation(f"{size} attached bytes, and {self._bytes} of others; the limit is {self._bytes_max}")
        self._bytes += size
        self._coming[key] = frame, bytearray()  # grows as bytes come: to announce a size costs a liar nothing

    def piece(self, key: Key, data: bytes) -> tuple[Open | Item, memoryview] | None:
        """Take a stream's next bytes, which its table has allowed; return the frame that is whole by them.

        Raises `PeerViolation` for bytes that were sent before there was room for them.
        """
        self.taken += len(data)
        if self.taken > WINDOW_BYTES:
            raise PeerViolation(f"{self.taken} attached bytes on their way; the limit is {WINDOW_BYTES}")
        if key not in self._coming:  # nobody waits for it any more
            return None
        frame, buffer = self._coming[key]
        buffer += data
        if len(buffer) < frame.attached:
            return None
        self.drop(key)
        return frame, memoryview(buffer).toreadonly()

    def grant(self, key: Key, units: int) -> bool:
        """Add credit to a request that is not whole yet; return whether there was one."""
        if key not in self._coming:
            return False
        frame, buffer = self._coming[key]
        assert isinstance(frame, Open)
        self._coming[key] = evolve(frame, credit=frame.credit + units), buffer
        return True

    def drop(self, key: Key) -> bool:
        """Forget what is whole or has ended early; return whether there was anything."""
        coming = self._coming.pop(key, None)
        if coming is not None:
            self._bytes -= coming[0].attached
        return coming is not None


def _size(views: Views) -> int:
    return sum(map(len, views))
