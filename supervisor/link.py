"""A link: many streams over one transport. Its reader never waits on a consumer; its writer is never torn.

What may be said when stands in `protocol.streams`; this file only moves bytes and wakes tasks. Whoever asks over a link
sees what it would see of an actor next door.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import trio
from attrs import define, field

from actors._kit import Answer, Asks
from protocol import messages
from protocol.errors import LinkLost, Overloaded, PeerLost, PeerViolation, RequestError, from_code
from protocol.frames import Bye, Cancel, Credit, End, Fail, Frame, Hello, Item, Open, Step
from protocol.messages import Accepted, Finished, Message, Started, Text, Tokens, Usage
from protocol.peer import Peer

Replies = Answer[Message, Message]


class Transport(Protocol):
    """Bytes, whole and in order; raises `trio.BrokenResourceError` or returns nothing once the other end is gone."""

    async def send_all(self, data: bytes) -> None:
        """Write all of `data`."""

    async def receive_some(self) -> bytes | bytearray:
        """Return some bytes, none at the end."""


@define(eq=False)
class _Serving:
    scope: trio.CancelScope
    answer: Replies | None = None
    granted: int = 0  # credit that came before the answerer had been asked


@define(eq=False)
class Link:
    """One end of a link; `serves` says who answers which kind of request that the other end asks."""

    transport: Transport
    peer: Peer
    serves: Mapping[type[Message], Asks[Message, Message, Message]] = field(factory=dict)
    lost_as: type[RequestError] = LinkLost
    queued_bytes_max: int = 256 * 1024 * 1024
    release_s: float = 10.0
    _asked: dict[int, Replies] = field(factory=dict)
    _serving: dict[int, _Serving] = field(factory=dict)
    _writer: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _permits: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _ready: trio.Event = field(factory=trio.Event)
    _carrying: trio.CancelScope = field(factory=trio.CancelScope)
    _violation: PeerViolation | None = None
    _over: trio.Event = field(factory=trio.Event)
    _bye: Bye | None = None
    _lost: bool = False

    # The asking side -------------------------------------------------------------------

    def open(self, request: Message, credit: int) -> tuple[int, Replies]:
        """Ask without waiting: the new stream's number and its answer.

        Raises `Overloaded` if the other end serves as many streams as it may, and the link's `lost_as` if it is lost.
        """
        if self._lost:
            raise self.lost_as("the link is down")
        if len(self.peer.asked) >= self.peer.asked.open_max:
            raise Overloaded(f"{len(self.peer.asked)} streams are open on this link")
        stream = self.peer.asked.last + 1
        body = messages.encode(request)
        answer = self._asked[stream] = Replies(credit)
        self._send(Open(stream, body, credit))
        return stream, answer

    def leave(self, stream: int) -> None:
        """Stop caring about a stream: synchronous, idempotent, legal at any moment; its answer ends when it is free."""
        if not self._lost and self.peer.asked.state(stream) == "open":
            self._send(Cancel(stream, "the asker left"))

    @asynccontextmanager
    async def ask(self, request: Message, credit: int) -> AsyncIterator[Replies]:
        """Ask, waiting for a free stream; leaving the context is leaving the answer."""
        await trio.lowlevel.checkpoint()
        while not self._lost and len(self.peer.asked) >= self.peer.asked.open_max:
            await self._permits.park()
        stream, answer = self.open(request, credit)
        try:
            yield answer
        finally:
            self.leave(stream)
            answer.enough()

    # The serving side ------------------------------------------------------------------

    async def _serve(self, stream: int, request: Message, credit: int) -> None:
        serving = self._serving[stream]
        last: End | Fail = Fail(stream, "left", "the asker left")
        try:
            try:
                with serving.scope:
                    async with self.serves[type(request)].ask(request, credit) as answer:
                        answer.credit += serving.granted
                        serving.answer = answer
                        result = await answer.relay(partial(self._put, stream))
                        last = End(stream, messages.encode(result) if result is not None else b"")
            except* RequestError as group:
                error = _first(group)
                last = Fail(stream, error.code, error.detail, error.param)
            # The answerer may still hold what it needs to let go of: the stream is closed when it has, not before.
            if serving.answer is not None:
                with trio.move_on_after(self.release_s, shield=True):
                    await serving.answer.over.wait()
        finally:
            del self._serving[stream]
        if not self._lost:
            self._send(last)

    def _put(self, stream: int, reply: Message) -> None:
        if not self._lost:
            self._send(Item(stream, messages.encode(reply), units_of(reply)))

    # The wire --------------------------------------------------------------------------

    async def run(  # noqa: ASYNC128  # _read_frames calls started()
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Carry the link until it is cancelled; raises `PeerLost` or `PeerViolation` if it ends otherwise.

        `started()` means that the other end has said Hello.
        """
        with self._carrying:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                try:
                    await self._read_frames(nursery, task_status)
                except PeerViolation as error:
                    self._violation = error
                finally:
                    self._end()  # at once: the tasks that serve may take their time, and must not send any more
                nursery.cancel_scope.cancel(reason="the link is lost")
        if self._violation is not None:
            raise self._violation
        raise PeerLost(f"{self._bye.code}: {self._bye.detail}" if self._bye else "the other end closed the link")

    async def _read_frames(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        while data := await self._read():
            for frame in self.peer.receive(data):
                self._received(frame, nursery)
                if isinstance(frame, Hello):
                    self._ready.set()
                    self._permits.unpark_all()
                    task_status.started()
                if self._carrying.cancel_called:  # the other end does not read: what it says no longer counts
                    return

    def bye(self, code: str, detail: str) -> None:
        """Tell the other end that this one ends the link, and why."""
        if not self._lost:
            self._send(Bye(code, detail))

    @property
    def ready(self) -> bool:
        """Whether the other end has ever said Hello."""
        return self.peer.hello is not None

    async def wait_ready(self) -> None:
        """Wait until the other end has said Hello."""
        await self._ready.wait()

    async def wait_lost(self) -> None:
        """Wait until the link is lost."""
        await self._over.wait()

    @property
    def farewell(self) -> Bye | None:
        """What the other end said when it ended the link, if it said anything."""
        return self._bye

    def _received(self, frame: Frame, nursery: trio.Nursery) -> None:  # noqa: C901  # one case a frame
        """Act on one legal frame without ever waiting: credit is what makes that safe."""
        match frame:
            case Step():
                self._stepped(frame)
            case Item():
                self._asked[frame.stream].put(messages.decode(frame.body), frame.units)
            case End():
                result = messages.decode(frame.body) if frame.body else None
                self._closed(frame.stream).end(result)
            case Fail():
                self._closed(frame.stream).fail(from_code(frame.code, frame.detail, frame.param))
            case Open():
                request = messages.decode(frame.body)
                if type(request) not in self.serves:
                    raise PeerViolation(f"a {type(request).__name__} was asked of an end that serves none")
                self._serving[frame.stream] = _Serving(trio.CancelScope())
                nursery.start_soon(self._serve, frame.stream, request, frame.credit)
            case Cancel():
                if (serving := self._serving.get(frame.stream)) is not None:
                    serving.scope.cancel(reason=f"peer: {frame.reason}")
            case Credit():
                self._granted(frame)
            case Bye():
                self._bye = frame
            case Hello():
                pass

    def _stepped(self, step: Step) -> None:
        asked = self._asked
        for begun in step.begun:
            asked[begun.stream].put(Started(begun.cached_tokens), 0)
        logprobs = step.logprobs
        for stream, ids in step.pieces():
            asked[stream].put(Tokens(ids, logprobs[stream]) if stream in logprobs else Tokens(ids), len(ids))
        for ended in step.ended:
            usage = Usage(ended.prompt_tokens, ended.completion_tokens, ended.cached_tokens)
            self._closed(ended.stream).end(Finished(ended.reason, usage, ended.matched))

    def _granted(self, frame: Credit) -> None:
        if (serving := self._serving.get(frame.stream)) is not None:
            if serving.answer is None:
                serving.granted += frame.units
            else:
                serving.answer.credit += frame.units

    def _closed(self, stream: int) -> Replies:
        self._permits.unpark()
        return self._asked.pop(stream)

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self._writer.unpark()
        if self.peer.queued_bytes > self.queued_bytes_max and not self._lost:
            # The other end is to blame, not whoever happened to send this: the link ends, and its sender hears so.
            self._violation = PeerViolation(f"the other end left {self.peer.queued_bytes} bytes unread")
            self._end()
            self._carrying.cancel(reason="the other end does not read")

    async def _write(self) -> None:
        while True:
            while data := self.peer.take():
                try:
                    await self.transport.send_all(data)
                except trio.BrokenResourceError:
                    return  # the reader sees the end too, and says so
            await self._writer.park()

    async def _read(self) -> bytes | bytearray:
        try:
            return await self.transport.receive_some()
        except trio.BrokenResourceError:
            return b""

    def _end(self) -> None:
        """Fail whoever asked; idempotent."""
        self._lost = True
        self._over.set()
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            answer.fail(self.lost_as("the link went down"))
        self._permits.unpark_all()


def units_of(reply: Message) -> int:
    """Return how much credit a reply takes: one unit a token, one for any other reply, none for a milestone."""
    match reply:
        case Tokens():
            return len(reply.ids)
        case Text():
            return reply.tokens
        case Started() | Accepted():
            return 0
        case _:
            return 1


def _first(group: BaseExceptionGroup[RequestError]) -> RequestError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RequestError)
    return error
