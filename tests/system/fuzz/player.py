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
        formatted = [formatter.format(record) for formatter in self._formats]
        if record.levelno >= logging.ERROR or record.exc_info:
            self.bad.append(f"it logged {formatted[1]}")
        elif not formatted[1].isprintable():
            self.bad.append(f"it logged what is no line: {formatted[1]!r}")


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
class Connection:
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
    _http: Connection | None = None
    _socket: Connection | None = None
    _open: list[Connection] = field(factory=list)

    async def play(self, number: int, seed: int) -> None:
        """Play one input, and note what is wrong with how it was taken."""
        fuzz_input = make(number, seed)
        self.active.add(number)
        self.counts[fuzz_input.kind if fuzz_input.exact is None else "exact"] += 1
        if self.show:
            print(f"{fuzz_input.kind}, {fuzz_input.leave.value}:", *fuzz_input.pieces, sep="\n  ")  # noqa: T201
        try:
            with trio.fail_after(2 * PATIENCE_S):
                await self._play(fuzz_input)
        except (Wrong, Unfinished, trio.TooSlowError) as error:
            self.problems.append(f"{number}: {fuzz_input.kind}: {str(error) or type(error).__name__}")
            self.forget()
        if self.watch.bad:
            self.problems += [f"one of {sorted(self.active)}: {bad}" for bad in self.watch.bad]
            self.watch.bad.clear()
        self.active.discard(number)

    def forget(self) -> None:
        """Close whatever is open."""
        for connection in self._open:
            connection.stream.socket.close()
        self._open.clear()
        self._http = self._socket = None

    async def _play(self, fuzz_input: Input) -> None:
        match fuzz_input.kind:
            case "exchange":
                await self._exchange(fuzz_input)
            case "event":
                await self._event(fuzz_input)
            case _:
                await self._raw(fuzz_input)

    async def _connect(self) -> Connection:
        stream = trio.SocketStream(trio.socket.socket())
        await stream.socket.connect(("127.0.0.1", self.port))
        self._open.append(connection := Connection(stream))
        return connection

    def _close(self, connection: Connection) -> None:
        connection.stream.socket.close()
        self._open.remove(connection)

    def _with_key(self, head: bytes) -> bytes:
        if self.key is None:
            return head
        return head.replace(b"\r\n", b"\r\nauthorization: Bearer %b\r\n" % self.key.encode(), 1)

    def _kept(self, connection: Connection | None) -> Connection | None:
        if connection is not None and trio.current_time() - connection.used_at > IDLE_S:
            self._close(connection)
            return None
        return connection

    # HTTP on a connection that is kept ---------------------------------------------------------

    async def _exchange(self, fuzz_input: Input) -> None:
        connection = self._kept(self._http) or await self._connect()
        self._http = connection
        if not await connection.send(self._with_key(fuzz_input.pieces[0])):
            raise Wrong("a connection that was to be kept is closed")
        answer = await self._answer(connection)
        if fuzz_input.exact is not None and not fuzz_input.exact.right(answer):
            raise Wrong(f"the wrong answer to {fuzz_input.pieces[0]!r:.300}: {answer.status} {answer.body!r:.600}")
        if not answer.whole or answer.headers.get(b"connection") == b"close":
            self._close(connection)
            self._http = None

    async def _answer(self, connection: Connection) -> Answer:
        while True:
            try:
                answer, connection.data = take(connection.data, ended=connection.ended)
            except Unfinished:
                await connection.more(PATIENCE_S)
                if not connection.data:
                    raise Wrong("a whole request got no answer") from None
            else:
                self._tell(answer)
                self.counts[f"status {answer.status}"] += 1
                if answer.status >= 200:
                    return answer

    # WebSocket on a connection that is kept ------------------------------------------------------

    async def _event(self, fuzz_input: Input) -> None:
        connection = self._kept(self._socket) or await self._shaken()
        self._socket = connection
        connection.uses += 1
        if not await connection.send(fuzz_input.pieces[0]):
            raise Wrong("a WebSocket that was to be kept is closed")
        events: list[dict[str, object]] = []
        while True:
            coming = await connection.more(QUIET_S if fuzz_input.exact is None else PATIENCE_S)
            new, code, connection.data = frames(connection.data, ended=connection.ended)
            events += new
            if code is not None and code == fuzz_input.closes:
                self.counts[f"close {code}"] += 1
                self._close(connection)
                self._socket = None
                return
            if code is not None or connection.ended or (fuzz_input.closes is not None and not coming):
                raise Wrong(f"one event closed the WebSocket: {code}, not {fuzz_input.closes}; {events[-1:]!r:.300}")
            theirs = [event for event in events if fuzz_input.exact is None or event.get("stream_id") == "exact"]
            if not coming or (theirs and theirs[-1]["type"] in FINAL_EVENTS):
                break
        self._tell(events)
        self.counts[f"event {events[-1]['type'] if events else 'none'}"] += 1
        if fuzz_input.exact is not None and not fuzz_input.exact.right(events):
            raise Wrong(f"the wrong answer: {events!r:.600}")
        if connection.uses >= EVENTS_A_SOCKET:
            self._close(connection)
            self._socket = None

    async def _shaken(self) -> Connection:
        connection = await self._connect()
        await connection.send(self._with_key(HANDSHAKE))
        answer = await self._upgraded(connection)
        if answer.status != 101:
            raise Wrong(f"no WebSocket: {answer.status}")
        return connection

    async def _upgraded(self, connection: Connection) -> Answer:
        while True:
            try:
                answer, connection.data = take(connection.data, ended=connection.ended)
            except Unfinished:
                if not await connection.more(PATIENCE_S):
                    raise Wrong("a handshake got no answer") from None
            else:
                return answer

    # A connection of its own -----------------------------------------------------------------------

    async def _raw(self, fuzz_input: Input) -> None:
        connection = await self._connect()
        for place, piece in enumerate(fuzz_input.pieces):
            with_key = place == 0 and fuzz_input.number % 4  # some are strangers
            if not await connection.send(self._with_key(piece) if with_key else piece):
                break
            if place + 1 < len(fuzz_input.pieces):
                await connection.more(QUIET_S)
        if fuzz_input.leave is Leave.RESET:
            connection.reset()
        if fuzz_input.leave not in {Leave.RESET, Leave.CLOSE}:
            await self._hear_out(connection, fuzz_input.leave)
            sent = b"".join(fuzz_input.pieces)
            if (
                fuzz_input.leave in WAITS
                and connection.ended
                and not connection.data
                and HEAD.search(sent.lstrip(b"\r\n"))
            ):
                raise Wrong("it was closed without a word")
            self._judge(sent, connection)
        self._close(connection)

    async def _hear_out(self, connection: Connection, leave: Leave) -> None:
        if leave is Leave.HALF:
            await self._half(connection)
        while await connection.more(PATIENCE_S if leave in {Leave.STALL, Leave.HALF} else QUIET_S):
            pass
        if leave is Leave.LATE_HALF:
            await self._half(connection)
            while await connection.more(PATIENCE_S):
                pass
        if leave is not Leave.QUIET and not connection.ended:
            raise Wrong(f"it {leave.value}, and the server does not close")

    async def _half(self, connection: Connection) -> None:
        try:
            await connection.stream.send_eof()
        except trio.BrokenResourceError:
            connection.ended = True

    def _judge(self, sent: bytes, connection: Connection) -> None:
        data, answers = connection.data, 0
        while data:
            try:
                answer, data = take(data, ended=connection.ended, bodiless=b"HEAD" in sent)
            except Unfinished:
                if b"text/event-stream" in data:  # which takes its time
                    break
                raise
            self._tell(answer)
            self.counts[f"status {answer.status}"] += 1
            answers += answer.status != 100
            if answer.status == 101:
                events, code, data = frames(data, ended=connection.ended)
                self._tell(events)
                self.counts[f"close {code}"] += 1
                return
        if answers > sent.count(b"\n") + 1:  # what is too long for a line is answered, too
            raise Wrong(f"{answers} answers to fewer requests")

    def _tell(self, answer: object) -> None:
        if self.show:
            print(f"<- {answer!r:.2000}")  # noqa: T201
