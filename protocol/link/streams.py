"""The state machine of a link's streams: the legal frames of each state. No I/O, no clock, no tasks.

Every rule about the legality of a frame is in this file, and both ends run the same table. A rule in a second place
would let the two ends of a link disagree about it.

A stream is opened by its *asker* and answered by the other end, the *answerer*. Frames cross in flight, so each end may
still receive frames from before a change of state:

* the asker may receive replies after its own `Cancel`; they are legal, spend credit, and are dropped;
* the answerer may receive `Credit`, `Cancel` and `RequestData` after its own `End` or `Fail`; they are legal and have
  no effect.

The attachment of a request or a reply follows it in pieces. Until all of it has arrived the answerer may send only
`Fail`, and nothing in a `Step`; the asker may send `Credit` and `Cancel`. After `Fail` or `Cancel` its sender sends no
more pieces.
"""

from __future__ import annotations

from protocol.errors import PeerViolation
from protocol.link.frames import Cancel, Credit, End, Fail, Frame, Item, Open, ReplyData, RequestData, Step

NEXT: dict[str, dict[type[Frame], str]] = {  # a stream's state -> {frame: its next state}
    "new": {Open: "open"},
    "open": {
        Item: "open",
        RequestData: "open",
        ReplyData: "open",
        Credit: "open",
        Cancel: "leaving",
        End: "closed",
        Fail: "closed",
    },
    "leaving": {Item: "leaving", End: "closed", Fail: "closed", ReplyData: "leaving"},
    "closed": {Credit: "closed", Cancel: "closed", RequestData: "closed"},
}

CREDIT_MAX = 2**31 - 1


class Streams:
    """The streams that one end of a link opened, as either end sees them."""

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self.last = 0  # the number of the newest stream; numbers are 1, 2, 3, ... in the order of opening
        self._credit: dict[int, int] = {}
        self._leaving: set[int] = set()
        # Attached bytes still to come, by stream: of the request, and of the latest reply.
        self._asking: dict[int, int] = {}
        self._replying: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of open streams."""
        return len(self._credit)

    def state(self, stream: int) -> str:
        """Return `new`, `open`, `leaving` or `closed`."""
        if stream in self._credit:
            return "leaving" if stream in self._leaving else "open"
        return "closed" if 0 < stream <= self.last else "new"

    def credit(self, stream: int) -> int:
        """Return the units of credit left to a stream; 0 for a closed one."""
        return self._credit.get(stream, 0)

    @property
    def owing(self) -> bool:
        """Whether bytes of any stream are still to come."""
        return bool(self._asking or self._replying)

    def owed(self, stream: int) -> tuple[int, int]:
        """Return the bytes to come of the attachments of the request and of the latest reply."""
        return self._asking.get(stream, 0), self._replying.get(stream, 0)

    def step(self, frame: Open | RequestData | Credit | Cancel | Item | ReplyData | End | Fail) -> str:
        """Apply one frame, sent or received, and return the next state of its stream."""
        stream = frame.stream
        before = self.state(stream)
        after = NEXT[before].get(type(frame))
        if after is None:
            raise PeerViolation(f"{type(frame).__name__} on stream {stream}, which is {before}")
        match frame:
            case Item():
                self._reply(frame)
            case Credit() if before == "open":
                self._grant(stream, frame.units)
            case Open():
                self._open(stream, frame.credit)
                _owe(self._asking, stream, frame.attached)
            case RequestData() if before == "open" or not frame.data:
                _pay(self._asking, stream, len(frame.data))
            case ReplyData():
                _pay(self._replying, stream, len(frame.data))
            case Cancel() if before == "open":
                self._leaving.add(stream)
            case End():
                self._whole(stream)
                self._close(stream)
            case Fail():
                self._close(stream)
        return after

    def step_tokens(self, frame: Step) -> None:
        """Apply one engine step: an `Item` for each of its streams, an `End` for each ended one."""
        if len(frame.streams) != len(frame.counts) or sum(frame.counts) != len(frame.tokens):
            raise PeerViolation("the arrays of a Step do not fit each other")
        if self.owing:
            for stream in (
                *frame.streams,
                *(begun.stream for begun in frame.begun),
                *(ended.stream for ended in frame.ended),
            ):
                self._whole(stream)
        for begun in frame.begun:
            if begun.stream not in self._credit:
                raise PeerViolation(f"tokens on stream {begun.stream}, which is {self.state(begun.stream)}")
        credit = self._credit
        for stream, count in zip(frame.streams, frame.counts, strict=True):
            left = credit.get(stream, -1)  # `spend`, without a call for each token
            if not 0 <= count <= left:
                self.spend(stream, count)
            credit[stream] = left - count
        for ended in frame.ended:
            if ended.stream not in self._credit:
                raise PeerViolation(f"an end of stream {ended.stream}, which is {self.state(ended.stream)}")
            self._close(ended.stream)

    def spend(self, stream: int, units: int) -> None:
        """Spend units of a stream's credit, for a reply sent now or certain to be sent next."""
        left = self._credit.get(stream)
        if left is None:
            raise PeerViolation(f"a reply on stream {stream}, which is {self.state(stream)}")
        if not 0 <= units <= left:
            raise PeerViolation(f"a reply of {units} units on stream {stream}, which has credit for {left}")
        self._credit[stream] = left - units

    def _open(self, stream: int, credit: int) -> None:
        if stream != self.last + 1:
            raise PeerViolation(f"stream {stream} opened after stream {self.last}")
        if len(self._credit) >= self.open_max:
            raise PeerViolation(f"stream {stream} opened, but {self.open_max} are open already")
        self.last = stream
        self._credit[stream] = 0
        self._grant(stream, credit)

    def _grant(self, stream: int, units: int) -> None:
        if not 0 <= units <= CREDIT_MAX - self._credit[stream]:
            raise PeerViolation(f"stream {stream} was granted {units} units of credit")
        self._credit[stream] += units

    def _reply(self, item: Item) -> None:
        if self._asking or self._replying:
            self._whole(item.stream)
        self.spend(item.stream, item.units)
        if item.attached:
            _owe(self._replying, item.stream, item.attached)

    def _whole(self, stream: int) -> None:
        if owed := self._replying.get(stream, 0) or self._asking.get(stream, 0):
            raise PeerViolation(f"a reply on stream {stream} before {owed} bytes that were to come first")

    def _close(self, stream: int) -> None:
        del self._credit[stream]
        self._leaving.discard(stream)
        self._asking.pop(stream, None)
        self._replying.pop(stream, None)


def _owe(owed: dict[int, int], stream: int, size: int) -> None:
    if size < 0:
        raise PeerViolation(f"{size} bytes are attached on stream {stream}")
    if size:
        owed[stream] = size


def _pay(owed: dict[int, int], stream: int, size: int) -> None:
    left = owed.get(stream, 0)
    if not 0 < size <= left:
        raise PeerViolation(f"{size} attached bytes on stream {stream}, which has {left} to come")
    if size < left:
        owed[stream] = left - size
    else:
        del owed[stream]
