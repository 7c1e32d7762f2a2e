"""One end of a link with no I/O in it: what it may say, what it may hear, and the bytes of both.

Trio's links and the engine host's asyncio drive the same `Peer`: they feed it what they read, act on the frames that it
yields, and write what it has queued. Long bodies go in pieces between the frames; nobody outside sees the pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import evolve

from protocol.attachments import ATTACHED_BYTES_MAX, PIECE_BYTES, Incoming, Key, Outgoing, Views
from protocol.errors import AskerLeft, LocalViolation, PeerViolation
from protocol.frames import (
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
    Open,
    ReplyData,
    RequestData,
    Step,
    WindowUpdate,
    encode,
)
from protocol.streams import Streams

MESSAGE_BYTES_MAX = 1024 * 1024  # of one message between nodes: what follows it does not wait for longer
QUEUED_BYTES_MAX = 2**63 - 1  # no queue is longer
NOTHING = memoryview(b"")
BUG = "this end was about to break the protocol"
# A tuple that is there already is found in half the time that it takes to write the union anew for every token.
OF_ASKER = (Credit, Open, RequestData, Cancel)
OF_ANSWERER = (Item, ReplyData, End, Fail)
WITH_ATTACHED = (Item, Open)
ENDS_EARLY = (Cancel, Fail)
PASSES = frozenset({Hello, Step, End, Bye, Announce})  # what is attached has nothing to do with these


class Peer:
    """The state of one end of a link.

    `asked` are the streams that this end opened, `served` those that the other end opened; either number is limited by
    the end that serves. `attached_bytes_max` is the same at both ends. A frame that is not legal raises `PeerViolation`
    if the other end has sent it, and `LocalViolation`, a bug of this end, if this one was to send it.
    """

    def __init__(
        self,
        name: str,
        *,
        serves_max: int,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        attached_bytes_max: int = ATTACHED_BYTES_MAX,
    ) -> None:
        self.hello: Hello | None = None  # the other end's, once it has come
        self.asked = Streams(0)
        self.served = Streams(serves_max)
        self.attached: memoryview = NOTHING  # to the frame that `receive` has just yielded
        self._reader = FrameReader(frame_bytes_max)
        self._queued: deque[bytes | memoryview] = deque()
        self._queued_bytes = 0
        self._outgoing = Outgoing(attached_bytes_max)
        self._incoming = Incoming(attached_bytes_max)
        self._enqueue(Hello(VERSION, name, serves_max))

    @property
    def queued_bytes(self) -> int:
        """How many bytes of frames wait to be written; what is attached to them is not counted."""
        return self._queued_bytes + self._outgoing.behind_bytes

    @property
    def ready(self) -> bool:
        """Whether `take` has anything to return; what is received may make it so, without anything being sent."""
        return bool(self._queued or self._incoming.taken) or self._outgoing.ready

    def send(self, frame: Frame, attached: Views = ()) -> None:
        """Queue a frame, if it is legal now, and after it the bytes that its `attached` counts.

        What a stream says while such bytes wait is kept behind them. Raises `TooLarge` or `Overloaded`, before anything
        has happened, for more bytes than may ever be attached, or may be now.
        """
        try:
            size = frame.attached if isinstance(frame, WITH_ATTACHED) else 0
            if size or attached:
                attached = self._outgoing.fit(size, attached)
            if self.served.owing and self._waits(frame, attached):
                return
            self._apply(frame, sent=True)
            self._enqueue(frame)
            if isinstance(frame, ENDS_EARLY):  # whoever was to get the rest does not want it, or will not get it
                self._forget(_key(frame, sent=True))
            elif size and isinstance(frame, WITH_ATTACHED):
                self._outgoing.put(_key(frame, sent=True), attached)
        except PeerViolation as error:
            raise LocalViolation(f"{BUG}: {error}") from error

    def take(self, bytes_max: int = QUEUED_BYTES_MAX) -> bytes:
        """Return what is queued and a little of what is attached, as one message, and forget it.

        Of more than `bytes_max` the rest stays queued, be it of a frame. There is nothing to return while `ready` is
        false.
        """
        if self._incoming.taken:
            self._enqueue(WindowUpdate(self._incoming.taken))
            self._incoming.taken = 0
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

    def receive(self, data: bytes | bytearray) -> Iterator[Frame]:
        """Yield each frame that is whole by now and legal; the state has followed it when it is yielded.

        What was attached to an `Open` or an `Item` is in `attached` while it is yielded. Look at `ready` afterwards.
        """
        for frame in self._reader.feed(data):
            if isinstance(frame, Hello):
                self._greeted(frame)
            elif self.hello is None and not isinstance(frame, Bye):
                raise PeerViolation(f"{type(frame).__name__} before Hello")
            elif type(frame) is KeepAlive:
                continue  # that it has come is all that it says
            else:
                self._apply(frame, sent=False)
            if type(frame) in PASSES or (isinstance(frame, WITH_ATTACHED) and not frame.attached):
                yield frame
            else:
                yield from self._attached(frame)

    # What is attached --------------------------------------------------------------------

    def _enqueue_attached(self, bytes_max: int) -> None:
        """Queue the next pieces of what is attached, and the frames that waited behind a last piece."""
        size = PIECE_BYTES
        while size and self._outgoing.ready and self._queued_bytes < bytes_max:
            (asked, stream), piece, said = self._outgoing.piece(size)
            size -= len(piece)
            part = RequestData(stream, piece) if asked else ReplyData(stream, piece)
            self._apply(part, sent=True)
            self._enqueue(part)
            for frame in said:
                self._apply(evolve(frame, units=0) if isinstance(frame, Item) else frame, sent=True)  # it has spent
                self._enqueue(frame)

    def _waits(self, frame: Frame, views: Views) -> bool:
        """Keep a frame of a stream whose reply has bytes to come, and return whether that is all to be done with it."""
        if not isinstance(frame, OF_ANSWERER) or isinstance(frame, ReplyData):
            return False
        key = _key(frame, sent=True)
        if self._outgoing.ended(key):
            raise PeerViolation(f"{type(frame).__name__} on stream {frame.stream}, which has ended")
        if isinstance(frame, Fail) or not self.served.owed(frame.stream)[1]:
            return False
        if isinstance(frame, Item):
            self.served.spend(frame.stream, frame.units)
        if key in self._outgoing:
            self._outgoing.behind(key, frame, views)
        elif isinstance(frame, End):  # the asker left, so the bytes will never come, nor what was to follow them
            self._left(frame.stream)
        return True

    def _attached(self, frame: Frame) -> Iterator[Frame]:
        """Yield what a frame makes whole: itself, nothing yet, or the one that it is the last piece of."""
        match frame:
            case Credit() if not self._incoming.grant((False, frame.stream), frame.units):
                yield frame
            case RequestData() | ReplyData():
                if (whole := self._incoming.piece(_key(frame, sent=False), frame.data)) is not None:
                    whole_frame, self.attached = whole
                    try:
                        yield whole_frame
                    finally:
                        self.attached = NOTHING
            case Item() if self.asked.state(frame.stream) == "leaving":  # its bytes are dropped as they come
                pass
            case Open() | Item():
                self._incoming.expect(_key(frame, sent=False), frame)
            case WindowUpdate():
                self._outgoing.taken(frame.size)
            case Cancel():
                yield from self._cancelled(frame)
            case Fail():
                self._forget((True, frame.stream))
                yield frame
            case _:  # Credit that a request has now which is not whole yet
                pass

    def _cancelled(self, frame: Cancel) -> Iterator[Frame]:
        """Let go of what is on its way for an asker who left.

        Nobody outside knows of a request that is not whole, or has more to do for a reply that has ended but for its
        bytes; anybody else says how the stream ends.
        """
        key = _key(frame, sent=False)
        if self._incoming.drop(key) or self._outgoing.ended(key):
            self._left(frame.stream)
        else:
            self._outgoing.drop(key)
            yield frame

    def _left(self, stream: int) -> None:
        """End a stream in the name of an answerer who has nothing more to do with it."""
        self._outgoing.drop((False, stream))
        self.send(Fail(stream, AskerLeft.code, "the asker left"))

    def _forget(self, key: Key) -> None:
        self._outgoing.drop(key)
        self._incoming.drop(key)

    # The rules ---------------------------------------------------------------------------

    def _apply(self, frame: Frame, *, sent: bool) -> None:
        if isinstance(frame, OF_ASKER):
            (self.asked if sent else self.served).step(frame)
        elif isinstance(frame, Step):
            (self.served if sent else self.asked).step_tokens(frame)
        elif isinstance(frame, OF_ANSWERER):
            (self.served if sent else self.asked).step(frame)

    def _greeted(self, hello: Hello) -> None:
        if self.hello is not None:
            raise PeerViolation("a second Hello")
        if hello.version != VERSION:
            raise PeerViolation(f"the other end speaks version {hello.version} of the protocol, this one {VERSION}")
        self.hello = hello
        self.asked.open_max = hello.streams_max

    def _cut(self, size: int) -> bytes:
        """Take that many bytes off the queue, which has more."""
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


def _key(frame: Open | RequestData | Credit | Cancel | Item | ReplyData | End | Fail, *, sent: bool) -> Key:
    """Return whose stream a frame is about."""
    return isinstance(frame, OF_ASKER) is sent, frame.stream
