"""One end of a link with no I/O in it: what it may say, what it may hear, and the bytes of both.

Trio's links and the engine host's asyncio drive the same `Peer`: they feed it what they read, act on the frames that it
yields, and write what it has queued.
"""

from __future__ import annotations

from collections.abc import Iterator

from .errors import PeerViolation
from .frames import FRAME_BYTES_MAX, VERSION, Bye, Cancel, Credit, Frame, FrameReader, Hello, Open, Step, encode
from .streams import Streams


class Peer:
    """The state of one end of a link.

    `asked` are the streams that this end opened, `served` those that the other end opened; either number is limited by
    the end that serves. Raises `PeerViolation` for a frame that is not legal, whoever sent it.
    """

    def __init__(self, name: str, *, serves_max: int, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.hello: Hello | None = None  # the other end's, once it has come
        self.asked = Streams(0)
        self.served = Streams(serves_max)
        self._reader = FrameReader(frame_bytes_max)
        self._queued: list[bytes] = []
        self._queued_bytes = 0
        self._enqueue(Hello(VERSION, name, serves_max))

    @property
    def queued_bytes(self) -> int:
        """How many bytes wait to be written."""
        return self._queued_bytes

    def send(self, frame: Frame) -> None:
        """Queue a frame, if it is legal now."""
        self._apply(frame, sent=True)
        self._enqueue(frame)

    def take(self) -> bytes:
        """Return everything that is queued, as one message, and forget it."""
        data = b"".join(self._queued)
        self._queued.clear()
        self._queued_bytes = 0
        return data

    def receive(self, data: bytes | bytearray) -> Iterator[Frame]:
        """Yield each frame that is whole by now and legal; the state has followed it when it is yielded."""
        for frame in self._reader.feed(data):
            if isinstance(frame, Hello):
                self._greeted(frame)
            elif self.hello is None and not isinstance(frame, Bye):
                raise PeerViolation(f"{type(frame).__name__} before Hello")
            else:
                self._apply(frame, sent=False)
            yield frame

    def _apply(self, frame: Frame, *, sent: bool) -> None:
        match frame:
            case Open() | Credit() | Cancel():  # from the asker
                (self.asked if sent else self.served).step(frame)
            case Step():  # from the answerer
                (self.served if sent else self.asked).step_tokens(frame)
            case Hello() | Bye():
                pass
            case _:
                (self.served if sent else self.asked).step(frame)

    def _greeted(self, hello: Hello) -> None:
        if self.hello is not None:
            raise PeerViolation("a second Hello")
        if hello.version != VERSION:
            raise PeerViolation(f"the other end speaks version {hello.version} of the protocol, this one {VERSION}")
        self.hello = hello
        self.asked.open_max = hello.streams_max

    def _enqueue(self, frame: Frame) -> None:
        data = encode(frame)
        self._queued.append(data)
        self._queued_bytes += len(data)
