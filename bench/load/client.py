"""One request: its connection, its bytes, and its answer, read to the end or abandoned.

Times are read from one clock. `sent_at` is when the request's first byte is handed to the socket: to connect, and a
WebSocket's handshake, count for `connect_s` and not for the answer.
"""

from __future__ import annotations

import ssl
from array import array
from collections.abc import Callable

import trio
from attrs import define, field

from bench.load import requests
from bench.load.answers import CANCELLED, READERS, Answer
from bench.load.faults import RequestFailed, os_error_fault
from bench.load.messages import Ending, Fault, Record, Target
from bench.load.plan import PlannedRequest
from bench.load.requests import CANCEL, Address, Dialogue
from bench.load.websocket import SocketDialogue
from bench.load.wire import Wire, connect

Clock = Callable[[], float]
BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError)
REST_WITHIN_S = 1.0  # for the rest of a body, after its last event, before its connection is given up


@define(eq=False)
class Connection:
    """One connection with what is said on it."""

    wire: Wire
    dialogue: Dialogue

    def fresh(self) -> bool:
        """Whether another request may go out on it, as far as anybody can tell."""
        try:
            while self.dialogue.reusable and (data := self.wire.waiting()) is not None:
                if not isinstance(self.dialogue, SocketDialogue):
                    return False  # between two answers HTTP says nothing but its end
                self.dialogue.feed(data)  # pings, or the close
        except RequestFailed:
            return False
        return self.dialogue.reusable


@define(eq=False)
class Pool:
    """Connections that wait for their next request; the one that was used last is taken first."""

    target: Target
    where: Address
    opened: int = 0
    _idle: list[Connection] = field(factory=list)

    async def take(self) -> tuple[Connection, bool]:
        """Return a connection, and whether it is new; raises `RequestFailed`, or what the system says against it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.fresh():
                return connection, False
            connection.wire.close()
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
        return Connection(wire, dialogue), True

    def give(self, connection: Connection) -> None:
        """Take a connection back, for the next request."""
        self._idle.append(connection)

    def close(self) -> None:
        """Close all that wait."""
        while self._idle:
            self._idle.pop().wire.close()


class Left(Exception):
    """The client leaves as planned."""


@define(eq=False)
class Exchange:
    """One request under way. `run` never raises for what a server does."""

    ask: PlannedRequest
    pool: Pool
    clock: Clock
    came: Callable[[int], None]  # is told how many tokens each read has brought
    _answer: Answer = field(factory=Answer)
    _sent_at: float | None = None
    _ended_at: float = 0.0
    _connect_s: float | None = None
    _cancel_s: float | None = None
    _stamps: array[float] = field(factory=lambda: array("d"))
    _weights: array[int] = field(factory=lambda: array("I"))
    _connection: Connection | None = None

    async def run(self, start_at: float, lag_s: float | None = None, held_s: float | None = None) -> Record:
        """Carry the request out and return how it went; `start_at` is the clock's time from which times count."""
        begun_at = self.clock()
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
        if ending != "completed":
            self._ended_at = self.clock()
        return self._record(start_at, begun_at, ending, fault, lag_s, held_s)

    # The talk ----------------------------------------------------------------------------

    async def _run(self, limit_at: float) -> None:
        kept = False
        try:
            try:
                await self._ask(limit_at)
            except Left:
                if self._connection is None or self.pool.target.cancel_by == "close":
                    raise
                await self._take_back(limit_at)
            kept = await self._kept()
        finally:
            if self._connection is not None and not kept:
                self._connection.wire.close()

    async def _ask(self, limit_at: float) -> None:
        """Send and listen until the answer is whole; raises `Left` when it is time to leave."""
        words, began_at = requests.body(self.pool.target, self.ask), self.clock()
        leave = self.ask.leave
        early_at = float("inf")
        with trio.CancelScope(deadline=limit_at) as scope:
            self._connection, new = await self.pool.take()
            self._sent_at = self.clock()
            self._connect_s = self._sent_at - began_at if new else None
            if leave is not None and leave.after_s is not None:
                early_at = trio.current_time() + leave.after_s
                scope.deadline = min(limit_at, early_at)
            await self._connection.wire.send(self._connection.dialogue.begin(words))
            await self._listen(None if leave is None else max(leave.tokens, 1))
        if scope.cancelled_caught:
            raise Left if early_at < limit_at else RequestFailed("timeout", self._place())

    def _place(self) -> str:
        if self._sent_at is None:
            return "connecting"
        return "mid-stream" if self._stamps else "before the first token"

    async def _listen(self, leave_after: int | None) -> None:
        """Read the answer to its end; raises `Left` once it has brought so many tokens and goes on."""
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
            self.came(answer.tokens - before)
            self._ended_at = now
            if dialogue.finished and not answer.over:
                answer.ended()
            if dialogue.closed is not None and not answer.over:
                raise dialogue.closed
            if urgent := dialogue.outgoing:
                await wire.send(urgent)
            if leave_after is not None and answer.tokens >= leave_after and not answer.over:
                raise Left

    async def _take_back(self, limit_at: float) -> None:
        """Cancel by an event, and wait for the end of the response."""
        assert self._connection is not None
        cancelled_at = self.clock()
        with trio.CancelScope(deadline=limit_at) as scope:
            await self._connection.wire.send(self._connection.dialogue.begin(CANCEL))
            await self._listen(None)
        if scope.cancelled_caught:
            raise RequestFailed("timeout", "after response.cancel")
        self._cancel_s = self._ended_at - cancelled_at

    async def _kept(self) -> bool:
        """Give the connection back if it can serve another request; return whether it can."""
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

    # What is written down ----------------------------------------------------------------

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
        answer, leave = self._answer, self.ask.leave
        return Record(
            number=self.ask.number,
            ending=ending,
            sent_s=sent_at - start_at,
            ended_s=self._ended_at - sent_at,
            stamps=self._stamps.tobytes(),
            weights=b"" if all(weight == 1 for weight in self._weights) else self._weights.tobytes(),
            planned_s=self.ask.at_s,
            lag_s=lag_s,
            held_s=held_s,
            connect_s=self._connect_s,
            finish=answer.finish,
            fault=fault,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            wanted_tokens=self.ask.output_tokens,
            leave_tokens=None if leave is None else leave.tokens,
            cancel_s=self._cancel_s,
        )
