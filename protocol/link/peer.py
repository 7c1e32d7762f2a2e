"""One end of a link without I/O: the legality and the bytes of the frames that it sends and receives.

A link in Trio and an engine's host in asyncio drive the same `Peer`, as with h2 or wsproto: they feed it received
bytes, act on the frames that it yields, and write its queue. So the protocol is tested without a network, and two
programs cannot differ in it. Attachments are sent in pieces between the frames; callers get only whole ones.

A `Peer` never waits, reads no clock and sets no limit on queued frames: its owner decides when to write, and watches
`queued_bytes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from attrs import evolve, frozen

from protocol.byte_budget import ByteShare
from protocol.errors import AskerLeft, LocalViolation, Overloaded, PeerViolation
from protocol.link.attachments import PIECE_BYTES, Incoming, Outgoing, StreamKey, Views
from protocol.link.frames import (
    ATTACHED_BYTES_MAX,
    FRAME_BYTES_MAX,
    VERSION,
    Announce,
    Bye,
    Cancel,
    Credit,
    End,
    Fail,
    Frame,
    FrameReader,
    Hello,
    Item,
    KeepAlive,
    OfferedMemory,
    Open,
    ReadsMemory,
    ReplyData,
    RequestData,
    Step,
    Taken,
    WindowUpdate,
    encode,
)
from protocol.link.streams import Streams

MESSAGE_BYTES_MAX = 1024 * 1024
"""The most bytes of one WebSocket message between nodes: the next message waits behind no more."""

QUEUED_BYTES_MAX = 2**63 - 1  # no limit
NOTHING = memoryview(b"")
BUG = "this end was about to break the protocol"
# `isinstance` with a tuple made once takes half the time of one with a union that is made for every token.
ASKER_FRAMES = (Credit, Open, RequestData, Cancel)
ANSWERER_FRAMES = (Item, ReplyData, End, Fail)
WITH_ATTACHED = (Item, Open)
ENDS_EARLY = (Cancel, Fail)
WITHOUT_ATTACHMENT = frozenset(
    {Hello, Step, End, Bye, Announce, ReadsMemory, Taken}
)  # frames that have nothing to do with attachments


@frozen
class PeerStatistics:
    """Counts of the streams and attachments on one end of a link.

    `sending_bytes` and `receiving_bytes` are the sizes of all incomplete attachments, `buffered_bytes` their received
    part. `in_flight_bytes` have been sent and not acknowledged, `unacknowledged_bytes` have arrived. `waiting`
    attachments find no room yet.
    """

    asked: int = 0
    served: int = 0
    queued_bytes: int = 0
    sending_bytes: int = 0
    in_flight_bytes: int = 0
    receiving_bytes: int = 0
    buffered_bytes: int = 0
    unacknowledged_bytes: int = 0
    waiting: int = 0


class Peer:
    """The state of one end of a link.

    This end opened the streams in `asked`, the other end the streams in `served`. The serving end limits the number of
    streams, the receiving end the bytes of incomplete attachments. An illegal frame raises `PeerViolation` on receive,
    and `LocalViolation`, a bug of this end, on send. `check_attached` is called with each frame with an attachment, and
    raises `PeerViolation` before a byte of the attachment is kept.
    """

    def __init__(
        self,
        name: str,
        *,
        serves_max: int,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        attached_bytes_max: int = ATTACHED_BYTES_MAX,
        memory: OfferedMemory | None = None,  # this end's
    ) -> None:
        self.hello: Hello | None = None  # the other end's, once it has arrived
        self.asked = Streams(0)
        self.served = Streams(serves_max)
        self.attached: memoryview = NOTHING  # the attachment of the frame in `receive_data`
        self.check_attached: Callable[[Open | Item], None] = _accept
        self._reader = FrameReader(frame_bytes_max)
        self._queued: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._outgoing = Outgoing(attached_bytes_max)
        self._incoming = Incoming(attached_bytes_max)
        hello = Hello(VERSION, name, serves_max, True, attached_bytes_max, memory)  # it takes steps
        self._enqueue(hello)

    @property
    def queued_bytes(self) -> int:
        """Bytes of unwritten frames, without attachments."""
        return self._queued_bytes + self._outgoing.held_bytes

    def statistics(self) -> PeerStatistics:
        """Return what this end holds now."""
        return PeerStatistics(
            asked=len(self.asked),
            served=len(self.served),
            queued_bytes=self.queued_bytes,
            sending_bytes=self._outgoing.budget.taken_bytes,
            in_flight_bytes=self._outgoing.in_flight_bytes,
            receiving_bytes=self._incoming.promised_bytes,
            buffered_bytes=self._incoming.buffered_bytes,
            unacknowledged_bytes=self._incoming.unacknowledged_bytes,
            waiting=self._outgoing.budget.waiting,
        )

    @property
    def ready(self) -> bool:
        """Whether `data_to_send` has anything to return; received data alone may change it."""
        return bool(self._queued or self._incoming.unacknowledged_bytes) or self._outgoing.ready

    def takes_steps(self, stream: int) -> bool:
        """Return whether tokens of a stream may be sent in a `Step` now; only an `Item` can wait for an attachment."""
        if self.hello is None or not self.hello.takes_steps:
            return False
        # Asked for every token of every stream: without attachments no table is searched.
        if not (self.served.owing or self._outgoing.unsent):
            return True
        return (False, stream) not in self._outgoing.unsent and not self.served.owed(stream)[1]

    def share(self, size: int, on_taken: Callable[[], None]) -> ByteShare:
        """Return a share of the room for attachments, taken or waiting, for an `Open` with `size` attached bytes.

        Its holder passes it to `send`, or gives it back. Raises `TooLarge` for more bytes than the limit of the link.
        """
        self._outgoing.check_size(size)
        return self._outgoing.budget.share(size, on_taken)

    def send(self, frame: Frame, attached: Views = (), share: ByteShare | None = None) -> None:
        """Queue a frame, if it is legal now, and after it its attachment of `frame.attached` bytes.

        Further frames of the stream are held until the attachment has been sent. An `Item` without room for its
        attachment is held, too; an `Open` cannot be held, and needs a taken `share`, or raises `Overloaded`. Raises
        `TooLarge` for more bytes than the limit of the link. No exception changes any state.
        """
        try:
            size = frame.attached if isinstance(frame, WITH_ATTACHED) else 0
            if size or attached:
                attached = self._outgoing.fit(size, attached)
            # A link without attachments, the common case, skips every check about them.
            if (size or self.served.owing or self._outgoing.unsent) and self._held_back(frame, attached):
                return
            if isinstance(frame, Open) and size and share is None and not self._outgoing.budget.fits(size):
                raise Overloaded(f"{size} bytes are attached, for which there is no room on this link now")
            self._apply(frame, sent=True)
            self._enqueue(frame)
            if isinstance(frame, ENDS_EARLY):  # no more of the attachment will be sent
                self._forget(_key(frame, sent=True))
            elif size and isinstance(frame, WITH_ATTACHED):
                share = share or self._outgoing.budget.share(size, _ignore)
                self._outgoing.put(_key(frame, sent=True), attached, share)
        except PeerViolation as error:
            raise LocalViolation(f"{BUG}: {error}") from error

    def data_to_send(self, bytes_max: int = QUEUED_BYTES_MAX) -> bytes:
        """Remove and return queued frames and a few pieces of attachments, as one WebSocket message.

        The message has at most `bytes_max` bytes, and may end within a frame. It is empty while `ready` is false.
        """
        # Acknowledged here and not on arrival: one frame for all pieces since the last write.
        if self._incoming.unacknowledged_bytes:
            self._enqueue(WindowUpdate(self._incoming.unacknowledged_bytes))
            self._incoming.unacknowledged_bytes = 0
        if self._outgoing.ready:
            try:
                self._enqueue_attached(bytes_max)
            except PeerViolation as error:
                raise LocalViolation(f"{BUG}: {error}") from error
        if self._queued_bytes > bytes_max:
            return self._cut(bytes_max)
        data = b"".join(self._queued)
        self._queued.clear()
        self._queued_bytes = 0
        return data

    def receive_data(self, data: bytes | bytearray) -> Iterator[Frame]:
        """Apply each complete and legal frame, then yield it.

        `attached` has the attachment of an `Open` or an `Item` until the next frame. Check `ready` afterwards.
        """
        for frame in self._reader.feed(data):
            if isinstance(frame, Hello):
                self._greeted(frame)
            elif self.hello is None and not isinstance(frame, Bye):
                raise PeerViolation(f"{type(frame).__name__} before Hello")
            elif type(frame) is KeepAlive:
                continue  # its arrival is its only content, and the caller has recorded it
            else:
                self._apply(frame, sent=False)
            if type(frame) in WITHOUT_ATTACHMENT or (isinstance(frame, WITH_ATTACHED) and not frame.attached):
                yield frame
            else:
                yield from self._attached(frame)

    # Attachments --------------------------------------------------------------------------

    def _enqueue_attached(self, bytes_max: int) -> None:
        """Queue the next pieces of attachments, and the held frames behind a last piece."""
        size = PIECE_BYTES
        while size and self._outgoing.ready and self._queued_bytes < bytes_max:
            key, piece = self._outgoing.next_piece(size)
            size -= len(piece)
            part = RequestData(key[1], piece) if key[0] else ReplyData(key[1], piece)
            self._apply(part, sent=True)
            self._enqueue(part)
            self._outgoing.piece_sent(key)
            self._send_held(key)

    def _send_held(self, key: StreamKey) -> None:
        """Queue the held frames of a stream as far as they may be sent now."""
        # A held `Item` has spent its credit already, in `_held_back`.
        for frame in self._outgoing.next_frames(key):
            self._apply(evolve(frame, units=0) if isinstance(frame, Item) else frame, sent=True)
            self._enqueue(frame)

    def _held_back(self, frame: Frame, views: Views) -> bool:
        """Hold back a frame behind an attachment, or for lack of room; return whether `send` is done with it."""
        if not isinstance(frame, ANSWERER_FRAMES) or isinstance(frame, ReplyData):
            return False
        key = _key(frame, sent=True)
        if self._outgoing.ended(key):
            raise PeerViolation(f"{type(frame).__name__} on stream {frame.stream}, which has ended")
        if isinstance(frame, Fail) or self.served.owed(frame.stream)[0]:
            return False
        is_behind = key in self._outgoing.unsent
        # Cancelled in the middle of an attachment: neither the rest of it nor the frames behind it are sent.
        is_cut = not is_behind and self.served.owed(frame.stream)[1] > 0
        if isinstance(frame, End):
            if is_behind:
                self._outgoing.hold(key, frame, (), None)
            elif is_cut:
                self._end_cancelled(frame.stream)
            return is_behind or is_cut
        size = frame.attached
        is_unwanted = size > 0 and self.served.state(frame.stream) == "leaving"
        if not (is_behind or is_cut or is_unwanted) and (not size or self._outgoing.budget.fits(size)):
            return False
        self.served.spend(frame.stream, frame.units)
        if not (is_cut or is_unwanted):
            share = self._outgoing.budget.share(size, partial(self._send_held, key)) if size else None
            self._outgoing.hold(key, frame, views, share)
        return True

    def _attached(self, frame: Frame) -> Iterator[Frame]:
        """Yield the frame that `frame` completes: itself, the frame of a complete attachment, or none."""
        match frame:
            case Credit() if not self._incoming.grant((False, frame.stream), frame.units):
                yield frame
            case RequestData() | ReplyData():
                if (whole := self._incoming.add_piece(_key(frame, sent=False), frame.data)) is not None:
                    whole_frame, self.attached = whole
                    try:
                        yield whole_frame
                    finally:
                        self.attached = NOTHING
            case Item() if self.asked.state(frame.stream) == "leaving":  # a dropped reply
                pass
            case Open() | Item():
                self.check_attached(frame)
                self._incoming.expect(_key(frame, sent=False), frame)
            case WindowUpdate():
                self._outgoing.acknowledge(frame.size)
            case Cancel():
                yield from self._cancelled(frame)
            case Fail():
                self._forget((True, frame.stream))
                yield frame
            case _:  # `Credit` of an incomplete request, added by `grant`
                pass

    def _cancelled(self, frame: Cancel) -> Iterator[Frame]:
        """Discard the attachments of a cancelled stream.

        An incomplete request was never yielded, and after a queued `End` only an attachment is unsent: such streams are
        ended here. The caller ends any other stream.
        """
        key = _key(frame, sent=False)
        if self._incoming.drop(key) or self._outgoing.ended(key):
            self._end_cancelled(frame.stream)
        else:
            self._outgoing.drop(key)
            yield frame

    def _end_cancelled(self, stream: int) -> None:
        """End a cancelled stream in place of its answerer."""
        self._outgoing.drop((False, stream))
        self.send(Fail(stream, AskerLeft.code, "the asker left"))

    def _forget(self, key: StreamKey) -> None:
        self._outgoing.drop(key)
        self._incoming.drop(key)

    # The rules ---------------------------------------------------------------------------

    def _apply(self, frame: Frame, *, sent: bool) -> None:
        if isinstance(frame, ASKER_FRAMES):
            (self.asked if sent else self.served).step(frame)
        elif isinstance(frame, Step):
            (self.served if sent else self.asked).step_tokens(frame)
        elif isinstance(frame, ANSWERER_FRAMES):
            (self.served if sent else self.asked).step(frame)

    def _greeted(self, hello: Hello) -> None:
        if self.hello is not None:
            raise PeerViolation("a second Hello")
        if hello.version != VERSION:
            raise PeerViolation(f"the other end speaks version {hello.version} of the protocol, this one {VERSION}")
        if hello.attached_bytes_max < 0:
            raise PeerViolation(f"the other end takes {hello.attached_bytes_max} attached bytes")
        if hello.memory is not None:
            hello.memory.check()
        self.hello = hello
        self.asked.open_max = hello.streams_max
        self._outgoing.budget.bytes_max = hello.attached_bytes_max

    def _cut(self, size: int) -> bytes:
        """Remove and return the first `size` bytes of a longer queue."""
        self._queued_bytes -= size
        cut: list[bytes | memoryview] = []
        while size:
            first = self._queued.popleft()
            if len(first) > size:
                whole = memoryview(first)
                first = whole[:size]
                self._queued.appendleft(whole[size:])
            cut.append(first)
            size -= len(first)
        return b"".join(cut)

    def _enqueue(self, frame: Frame) -> None:
        data = encode(frame)
        self._queued.append(data)
        self._queued_bytes += len(data)


def _accept(_: Open | Item) -> None:
    pass


def _ignore() -> None:
    pass


def _key(frame: Open | RequestData | Credit | Cancel | Item | ReplyData | End | Fail, *, sent: bool) -> StreamKey:
    """Return the stream of a frame, and whether this end opened it."""
    return isinstance(frame, ASKER_FRAMES) is sent, frame.stream
