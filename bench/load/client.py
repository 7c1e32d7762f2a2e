"""One request: its connection, its bytes, and its answer, read to the end.

Times are read from one clock. `sent_at` is when the request's first byte is passed to the socket: connecting, with a
WebSocket's handshake, counts for `connect_s` and not for the answer.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable
from contextlib import nullcontext

import trio
from attrs import define, field

from bench.load import requests
from bench.load.answers import READERS, Answer
from bench.load.messages import Fault, Record, RequestFailed, Target, os_error_fault
from bench.load.plan import PlannedRequest
from bench.load.requests import Address, Dialogue
from bench.load.websocket import SocketDialogue

Clock = Callable[[], float]
BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
REST_WITHIN_S = 1.0  # for the rest of a body after its last event; then its connection is closed
READ_BYTES_MAX = 16 * 1024  # tokens are small, and each read allocates as much


@define(eq=False)
class Wire:
    """A TCP connection, with as few system calls and task switches a read as Trio allows: they are most of its cost.

    Errors of the system are raised unchanged: `OSError` or Trio's own.
    """

    _socket: socket.socket  # never blocks

    async def send(self, data: bytes) -> None:
        """Send all of `data`; a checkpoint only when the system's buffer is full."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    async def receive(self) -> bytes:
        """Wait for bytes and return them; empty at the end."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(READ_BYTES_MAX)
            except BlockingIOError:
                continue

    def waiting(self) -> bytes | None:
        """Return the bytes that wait, empty at the end, None if there are none."""
        try:
            return self._socket.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """Close at once; a server that still sends gets a reset."""
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


async def connect(where: Address) -> Wire:
    """Open a connection; raises the system's error if it cannot."""
    stream = await trio.open_tcp_stream(where.host, where.port)
    plain = socket.socket(fileno=stream.socket.detach())
    plain.setblocking(False)
    return Wire(plain)


@define(eq=False)
class Connection:
    """One connection and its protocol."""

    wire: Wire
    dialogue: Dialogue

    def fresh(self) -> bool:
        """Whether it seems to be open for another request; input that waits is read."""
        try:
            while self.dialogue.reusable and (data := self.wire.waiting()) is not None:
                if not isinstance(self.dialogue, SocketDialogue):
                    return False  # between two answers an HTTP server only closes
                self.dialogue.feed(data)  # pings, or the close
        except RequestFailed:
            return False
        return self.dialogue.reusable


@define(eq=False)
class Pool:
    """Idle connections, of which the most recently used is taken first."""

    target: Target
    where: Address
    connecting: trio.Semaphore | None = None  # limits how many pools connect at once
    _idle: list[Connection] = field(factory=list)

    async def take(self) -> tuple[Connection, bool]:
        """Return a connection, and whether it is new; raises `RequestFailed` or one of `BROKEN`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.fresh():
                return connection, False
            connection.wire.close()
        async with self.connecting or nullcontext():
            return await self._connect(), True

    async def _connect(self) -> Connection:
        wire, dialogue = await connect(self.where), requests.dialogue(self.target, self.where)
        try:
            if hello := dialogue.hello():
                await wire.send(hello)
                while not dialogue.ready:
                    dialogue.feed(await wire.receive())
        except BaseException:
            wire.close()
            raise
        return Connection(wire, dialogue)

    def give(self, connection: Connection) -> None:
        """Return a connection for the next request."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().wire.close()


@define(eq=False)
class Exchange:
    """One request and its answer. `run` raises nothing because of the server."""

    request: PlannedRequest
    pool: Pool
    clock: Clock
    _answer: Answer = field(factory=Answer)
    _sent_at: float | None = None
    _ended_at: float = 0.0
    _connect_s: float | None = None
    _stamps: array[float] = field(factory=lambda: array("d"))
    _connection: Connection | None = None

    async def run(self, start_at: float) -> Record:
        """Send the request and return its record; times count from `start_at` by the clock."""
        begun_at = self.clock()
        fault: Fault | None = None
        try:
            await self._run()
        except RequestFailed as failed:
            fault = failed.fault
        except BROKEN as error:
            fault = os_error_fault(error, begun=self._connection is not None and self._connection.dialogue.begun).fault
        if fault is not None:
            self._ended_at = self.clock()
        sent_at, answer = begun_at if self._sent_at is None else self._sent_at, self._answer
        return Record(
            number=self.request.number,
            sent_s=sent_at - start_at,
            ended_s=self._ended_at - sent_at,
            stamps=self._stamps.tobytes(),
            connect_s=self._connect_s,
            finish=answer.finish,
            fault=fault,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
        )

    async def _run(self) -> None:
        kept = False
        try:
            with trio.move_on_after(self.pool.target.timeout_s) as scope:
                await self._send()
            if scope.cancelled_caught:
                raise RequestFailed("timeout", self._place())
            kept = await self._keep()
        finally:
            if self._connection is not None and not kept:
                self._connection.wire.close()

    def _place(self) -> str:
        if self._sent_at is None:
            return "connecting"
        return "mid-stream" if self._stamps else "before the first token"

    async def _send(self) -> None:
        """Send the request and read its answer to its end."""
        body, began_at = requests.body(self.pool.target, self.request), self.clock()
        self._connection, new = await self.pool.take()
        wire, dialogue, answer = self._connection.wire, self._connection.dialogue, self._answer
        self._sent_at = sent_at = self.clock()
        self._connect_s = sent_at - began_at if new else None
        await wire.send(dialogue.begin(body))
        read = READERS[self.pool.target.api]
        while not answer.over:
            data = await wire.receive()
            now = self.clock()
            for name, payload in dialogue.feed(data):
                if read(answer, name, payload):
                    self._stamps.append(now - sent_at)
            self._ended_at = now
            if dialogue.finished and not answer.over:
                answer.end()
            if dialogue.closed is not None and not answer.over:
                raise dialogue.closed
            if unasked := dialogue.outgoing:
                await wire.send(unasked)

    async def _keep(self) -> bool:
        """Return the connection to the pool if it can serve another request; return whether it can."""
        connection = self._connection
        assert connection is not None
        if not self.pool.target.reuse:
            return False
        dialogue = connection.dialogue
        try:
            with trio.move_on_after(REST_WITHIN_S):
                while not (dialogue.finished or isinstance(dialogue, SocketDialogue)):
                    dialogue.feed(await connection.wire.receive())
        except (RequestFailed, *BROKEN):
            return False
        if not dialogue.reusable or not (dialogue.finished or isinstance(dialogue, SocketDialogue)):
            return False
        self.pool.give(connection)
        return True
