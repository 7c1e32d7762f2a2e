"""Plays inputs against a gateway, and checks the responses and the log."""

from __future__ import annotations

import logging
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from attrs import Factory, define, field

from protocol.dialects.responses import FINAL_EVENTS
from supervisor.telemetry.logs import JsonFormatter, TextFormatter
from tests.system.fuzz.answers import Answer, Unfinished, Wrong, frames, take
from tests.system.fuzz.inputs import Input, Leave, make
from tests.system.fuzz.websocket import HANDSHAKE

QUIET_S = 0.2  # of virtual time, in which an answer that is not slow on purpose has come
PATIENCE_S = 400.0  # in which a server has had enough of anybody
EVENTS_A_SOCKET = 40
IDLE_S = 20.0  # after which a connection is not used again: the server may be about to close it
WAITS = {Leave.QUIET, Leave.STALL}  # who leaves in another way may get no answer
HEAD = re.compile(rb"\n\r?\n")
NO_LINGER = struct.pack("ii", 1, 0)


@define(eq=False)
class Watch(logging.Handler):
    """A log handler that keeps the records that must not occur."""

    bad: list[str] = Factory(list)
    lines: int = 0
    _formats: tuple[logging.Formatter, ...] = (JsonFormatter(), TextFormatter())

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        said = [each.format(record) for each in self._formats]
        if record.levelno >= logging.ERROR or record.exc_info:
            self.bad.append(f"it logged {said[1]}")
        elif not said[1].isprintable():
            self.bad.append(f"it logged what is no line: {said[1]!r}")


@contextmanager
def log_watched() -> Iterator[Watch]:
    """Hear what is logged while the body runs."""
    watch, root = Watch(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [watch]
    root.setLevel(logging.INFO)
    try:
        yield watch
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@define(eq=False)
class Heard:
    """A connection and what came over it that nobody has looked at yet."""

    stream: trio.SocketStream
    data: bytes = b""
    ended: bool = False
    uses: int = 0
    used_at: float = field(factory=trio.current_time)

    async def send(self, data: bytes) -> bool:
        """Send all of it, unless the server has closed the connection; return whether it has not."""
        self.used_at = trio.current_time()
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError:
            return False
        return True

    async def more(self, within_s: float) -> bool:
        """Wait for more to come; return whether it has."""
        with trio.move_on_after(within_s):
            try:
                data = await self.stream.receive_some(65_536)
            except trio.BrokenResourceError:
                data = b""
            self.data += data
            self.ended = not data
            return bool(data)
        return False

    def reset(self) -> None:
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.stream.socket.close()


@define(eq=False)
class Player:
    """Plays inputs one after the other, as one of many at the same gateway."""

    port: int
    watch: Watch
    problems: list[str]
    counts: Counter[str]
    active: set[int]
    show: bool = False
    key: str | None = None
    _http: Heard | None = None
    _socket: Heard | None = None
    _open: list[Heard] = field(factory=list)

    async def play(self, number: int, seed: int) -> None:
        """Play one input, and note what is wrong with how it was taken."""
        made = make(number, seed)
        self.active.add(number)
        self.counts[made.kind if made.exact is None else "exact"] += 1
        if self.show:
            print(f"{made.kind}, {made.leave.value}:", *made.pieces, sep="\n  ")  # noqa: T201
        try:
            with trio.fail_after(2 * PATIENCE_S):
                await self._play(made)
        except (Wrong, Unfinished, trio.TooSlowError) as error:
            self.problems.append(f"{number}: {made.kind}: {str(error) or type(error).__name__}")
            self.forget()
        if self.watch.bad:
            self.problems += [f"one of {sorted(self.active)}: {bad}" for bad in self.watch.bad]
            self.watch.bad.clear()
        self.active.discard(number)

    def forget(self) -> None:
        """Close whatever is open."""
        for heard in self._open:
            heard.stream.socket.close()
        self._open.clear()
        self._http = self._socket = None

    async def _play(self, made: Input) -> None:
        match made.kind:
            case "exchange":
                await self._exchange(made)
            case "event":
                await self._event(made)
            case _:
                await self._raw(made)

    async def _connect(self) -> Heard:
        stream = trio.SocketStream(trio.socket.socket())
        await stream.socket.connect(("127.0.0.1", self.port))
        self._open.append(heard := Heard(stream))
        return heard

    def _close(self, heard: Heard) -> None:
        heard.stream.socket.close()
        self._open.remove(heard)

    def _with_key(self, head: bytes) -> bytes:
        if self.key is None:
            return head
        return head.replace(b"\r\n", b"\r\nauthorization: Bearer %b\r\n" % self.key.encode(), 1)

    def _kept(self, heard: Heard | None) -> Heard | None:
        if heard is not None and trio.current_time() - heard.used_at > IDLE_S:
            self._close(heard)
            return None
        return heard

    # HTTP on a connection that is kept ---------------------------------------------------------

    async def _exchange(self, made: Input) -> None:
        heard = self._kept(self._http) or await self._connect()
        self._http = heard
        if not await heard.send(self._with_key(made.pieces[0])):
            raise Wrong("a connection that was to be kept is closed")
        answer = await self._answer(heard)
        if made.exact is not None and not made.exact.right(answer):
            raise Wrong(f"the wrong answer to {made.pieces[0]!r:.300}: {answer.status} {answer.body!r:.600}")
        if not answer.whole or answer.headers.get(b"connection") == b"close":
            self._close(heard)
            self._http = None

    async def _answer(self, heard: Heard) -> Answer:
        while True:
            try:
                answer, heard.data = take(heard.data, ended=heard.ended)
            except Unfinished:
                await heard.more(PATIENCE_S)
                if not heard.data:
                    raise Wrong("a whole request got no answer") from None
            else:
                self._tell(answer)
                self.counts[f"status {answer.status}"] += 1
                if answer.status >= 200:
                    return answer

    # WebSocket on a connection that is kept ------------------------------------------------------

    async def _event(self, made: Input) -> None:
        heard = self._kept(self._socket) or await self._shaken()
        self._socket = heard
        heard.uses += 1
        if not await heard.send(made.pieces[0]):
            raise Wrong("a WebSocket that was to be kept is closed")
        events: list[dict[str, object]] = []
        while True:
            coming = await heard.more(QUIET_S if made.exact is None else PATIENCE_S)
            new, code, heard.data = frames(heard.data, ended=heard.ended)
            events += new
            if code is not None and code == made.closes:
                self.counts[f"close {code}"] += 1
                self._close(heard)
                self._socket = None
                return
            if code is not None or heard.ended or (made.closes is not None and not coming):
                raise Wrong(f"one event closed the WebSocket: {code}, not {made.closes}; {events[-1:]!r:.300}")
            theirs = [event for event in events if made.exact is None or event.get("stream_id") == "exact"]
            if not coming or (theirs and theirs[-1]["type"] in FINAL_EVENTS):
                break
        self._tell(events)
        self.counts[f"event {events[-1]['type'] if events else 'none'}"] += 1
        if made.exact is not None and not made.exact.right(events):
            raise Wrong(f"the wrong answer: {events!r:.600}")
        if heard.uses >= EVENTS_A_SOCKET:
            self._close(heard)
            self._socket = None

    async def _shaken(self) -> Heard:
        heard = await self._connect()
        await heard.send(self._with_key(HANDSHAKE))
        answer = await self._upgraded(heard)
        if answer.status != 101:
            raise Wrong(f"no WebSocket: {answer.status}")
        return heard

    async def _upgraded(self, heard: Heard) -> Answer:
        while True:
            try:
                answer, heard.data = take(heard.data, ended=heard.ended)
            except Unfinished:
                if not await heard.more(PATIENCE_S):
                    raise Wrong("a handshake got no answer") from None
            else:
                return answer

    # A connection of its own -----------------------------------------------------------------------

    async def _raw(self, made: Input) -> None:
        heard = await self._connect()
        for place, piece in enumerate(made.pieces):
            known = place == 0 and made.number % 4  # some are strangers
            if not await heard.send(self._with_key(piece) if known else piece):
                break
            if place + 1 < len(made.pieces):
                await heard.more(QUIET_S)
        if made.leave is Leave.RESET:
            heard.reset()
        if made.leave not in {Leave.RESET, Leave.CLOSE}:
            await self._hear_out(heard, made.leave)
            sent = b"".join(made.pieces)
            if made.leave in WAITS and heard.ended and not heard.data and HEAD.search(sent.lstrip(b"\r\n")):
                raise Wrong("it was closed without a word")
            self._judge(sent, heard)
        self._close(heard)

    async def _hear_out(self, heard: Heard, leave: Leave) -> None:
        if leave is Leave.HALF:
            await self._half(heard)
        while await heard.more(PATIENCE_S if leave in {Leave.STALL, Leave.HALF} else QUIET_S):
            pass
        if leave is Leave.LATE_HALF:
            await self._half(heard)
            while await heard.more(PATIENCE_S):
                pass
        if leave is not Leave.QUIET and not heard.ended:
            raise Wrong(f"it {leave.value}, and the server does not close")

    async def _half(self, heard: Heard) -> None:
        try:
            await heard.stream.send_eof()
        except trio.BrokenResourceError:
            heard.ended = True

    def _judge(self, sent: bytes, heard: Heard) -> None:
        data, answers = heard.data, 0
        while data:
            try:
                answer, data = take(data, ended=heard.ended, bodiless=b"HEAD" in sent)
            except Unfinished:
                if b"text/event-stream" in data:  # which takes its time
                    break
                raise
            self._tell(answer)
            self.counts[f"status {answer.status}"] += 1
            answers += answer.status != 100
            if answer.status == 101:
                events, code, data = frames(data, ended=heard.ended)
                self._tell(events)
                self.counts[f"close {code}"] += 1
                return
        if answers > sent.count(b"\n") + 1:  # what is too long for a line is answered, too
            raise Wrong(f"{answers} answers to fewer requests")

    def _tell(self, said: object) -> None:
        if self.show:
            print(f"<- {said!r:.2000}")  # noqa: T201
