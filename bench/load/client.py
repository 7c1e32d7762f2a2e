"""One request: its connection, its bytes, and its answer, read to the end or abandoned.

Times are read from one clock. `sent_at` is when the request's first byte is passed to the socket: connecting, with a
WebSocket's handshake, counts for `connect_s` and not for the answer.
"""

from __future__ import annotations

import ssl
from array import array
from collections.abc import Callable
from contextlib import nullcontext

import trio
from attrs import define, field

from bench.load import requests
from bench.load.answers import CANCELLED, READERS, Answer
from bench.load.faults import RequestFailed, os_error_fault
from bench.load.messages import Ending, Fault, Record, Target
from bench.load.plan import PlannedRequest
from bench.load.requests import CANCEL, Address, Dialogue, History
from bench.load.websocket import SocketDialogue
from bench.load.wire import Wire, connect

Clock = Callable[[], float]
BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)
REST_WITHIN_S = 1.0  # for the rest of a body after its last event; then its connection is closed


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
    opened: int = 0
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
        self.opened += 1
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

    def lend(self, own: Pool) -> None:
        """Give an idle connection, if there is one, to the pool of a conversation, which needs it for all turns."""
        own._idle += self._idle[-1:]
        del self._idle[-1:]

    def take_back(self, own: Pool) -> None:
        """Take over the idle connections of a conversation that has ended."""
        self.opened += own.opened
        self._idle += own._idle

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().wire.close()


class Left(Exception):
    """The client disconnects as planned."""


@define(eq=False)
class Exchange:
    """One request and its answer. `run` raises nothing because of the server."""

    request: PlannedRequest
    pool: Pool
    clock: Clock
    on_tokens: Callable[[int], None]  # called with the number of tokens of each read
    history: History | None = None  # of a conversation with several turns; a completed one is added
    _answer: Answer = field(factory=Answer)
    _sent_at: float | None = None
    _ended_at: float = 0.0
    _connect_s: float | None = None
    _cancel_s: float | None = None
    _stamps: array[float] = field(factory=lambda: array("d"))
    _weights: array[int] = field(factory=lambda: array("I"))
    _connection: Connection | None = None

    async def run(self, start_at: float, lag_s: float | None = None, held_s: float | None = None) -> Record:
        """Send the request and return its record; times count from `start_at` by the clock."""
        begun_at = self.clock()
        self._answer.parts = None if self.history is None else []
        ending: Ending = "completed"
        fault: Fault | None = None
        try:
            await self._run(trio.current_time() + self.pool.target.timeout_s)
        except Left:
            ending = "cancelled"
        except RequestFailed as failed:
            ending, fault = "failed", failed.fault
        except BROKEN as error:
            begun = self._connection is not None and self._connection.dialogue.begun
            ending, fault = "failed", os_error_fault(error, begun=begun).fault
        if self._answer.finish == CANCELLED and ending == "completed":
            ending = "cancelled"
        if self.history is not None and ending == "completed":
            self.history.add(self.request.prompt, self._answer)
        if ending != "completed":
            self._ended_at = self.clock()
        return self._record(start_at, begun_at, ending, fault, lag_s, held_s)

    # The exchange ----------------------------------------------------------------------------

    async def _run(self, limit_at: float) -> None:
        kept = False
        try:
            try:
                await self._send(limit_at)
            except Left:
                if self._connection is None or self.pool.target.cancel_by == "close":
                    raise
                await self._cancel(limit_at)
            kept = await self._keep()
        finally:
            if self._connection is not None and not kept:
                self._connection.wire.close()

    async def _send(self, limit_at: float) -> None:
        """Send the request and read its answer; raises `Left` when the client is to disconnect."""
        body, began_at = requests.body(self.pool.target, self.request, self.history), self.clock()
        leave = self.request.leave
        early_at = float("inf")
        with trio.CancelScope(deadline=limit_at) as scope:
            self._connection, new = await self.pool.take()
            self._sent_at = self.clock()
            self._connect_s = self._sent_at - began_at if new else None
            if leave is not None and leave.after_s is not None:
                early_at = trio.current_time() + leave.after_s
                scope.deadline = min(limit_at, early_at)
            await self._connection.wire.send(self._connection.dialogue.begin(body))
            await self._read(None if leave is None else max(leave.tokens, 1))
        if scope.cancelled_caught:
            raise Left if early_at < limit_at else RequestFailed("timeout", self._place())

    def _place(self) -> str:
        if self._sent_at is None:
            return "connecting"
        return "mid-stream" if self._stamps else "before the first token"

    async def _read(self, leave_after: int | None) -> None:
        """Read the answer to its end; raises `Left` after `leave_after` tokens if it continues."""
        assert self._connection is not None
        assert self._sent_at is not None
        wire, dialogue, answer = self._connection.wire, self._connection.dialogue, self._answer
        read = READERS[self.pool.target.api]
        while not answer.over:
            data = await wire.receive()
            now, before = self.clock(), answer.tokens
            for name, payload in dialogue.feed(data):
                if tokens := read(answer, name, payload):
                    self._stamps.append(now - self._sent_at)
                    self._weights.append(tokens)
            self.on_tokens(answer.tokens - before)
            self._ended_at = now
            if dialogue.finished and not answer.over:
                answer.end()
            if dialogue.closed is not None and not answer.over:
                raise dialogue.closed
            if unasked := dialogue.outgoing:
                await wire.send(unasked)
            if leave_after is not None and answer.tokens >= leave_after and not answer.over:
                raise Left

    async def _cancel(self, limit_at: float) -> None:
        """Send `response.cancel` and wait for the end of the response."""
        assert self._connection is not None
        cancelled_at = self.clock()
        with trio.CancelScope(deadline=limit_at) as scope:
            await self._connection.wire.send(self._connection.dialogue.begin(CANCEL))
            await self._read(None)
        if scope.cancelled_caught:
            raise RequestFailed("timeout", "after response.cancel")
        self._cancel_s = self._ended_at - cancelled_at

    async def _keep(self) -> bool:
        """Return the connection to the pool if it can serve another request; return whether it can."""
        connection = self._connection
        assert connection is not None
        crossed = self._cancel_s is not None and self._answer.finish != CANCELLED  # the cancel may yet be answered
        if not self.pool.target.reuse or crossed:
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

    # The record -----------------------------------------------------------------------

    def _record(
        self,
        start_at: float,
        begun_at: float,
        ending: Ending,
        fault: Fault | None,
        lag_s: float | None,
        held_s: float | None,
    ) -> Record:
        sent_at = begun_at if self._sent_at is None else self._sent_at
        answer, leave = self._answer, self.request.leave
        return Record(
            number=self.request.number,
            turn=self.request.turn,
            ending=ending,
            sent_s=sent_at - start_at,
            ended_s=self._ended_at - sent_at,
            stamps=self._stamps.tobytes(),
            weights=b"" if all(weight == 1 for weight in self._weights) else self._weights.tobytes(),
            planned_s=self.request.at_s,
            lag_s=lag_s,
            held_s=held_s,
            connect_s=self._connect_s,
            finish=answer.finish,
            fault=fault,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            wanted_tokens=self.request.output_tokens,
            leave_tokens=None if leave is None else leave.tokens,
            cancel_s=self._cancel_s,
        )
