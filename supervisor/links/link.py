"""A link: many streams over one transport. Its reader never waits on a consumer; its writer is never torn.

What may be said when stands in `protocol.streams`; this file only moves bytes and wakes tasks. Whoever asks over a link
sees what it would see of an actor next door.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.calls import Answer, Askable
from protocol import codec
from protocol.codec import Message
from protocol.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    LinkLost,
    NotReady,
    Overloaded,
    PeerLost,
    PeerViolation,
    RequestError,
)
from protocol.frames import Announce, Bye, Cancel, Credit, End, Fail, Frame, Hello, Item, KeepAlive, Open, Step
from protocol.messages import Finished, Started, Tokens, Usage
from protocol.peer import MESSAGE_BYTES_MAX, Peer
from supervisor.links.encoding import (
    RECEIVED_A_TURN,
    ReplyRules,
    encode_body,
    failed,
    failure,
    first,
    printable,
    remaining_ms,
    reply_rules,
)
from supervisor.links.heartbeat import Heartbeat, HeartbeatTask, Liveness
from supervisor.links.traffic import Traffic
from supervisor.links.transport import Transport

STALLED_DETAIL = "the other end stands still"

Replies = Answer[Message, Message]

Services: TypeAlias = Mapping[tuple[str, type[Message]], Askable[Message, Message, Message]]
"""Who answers what the other end asks, by the name that it asks for and the kind of the request."""


@define(eq=False)
class _Serving:
    scope: trio.CancelScope
    answer: Replies | None = None
    granted: int = 0  # credit that came before the answerer had been asked


@define(eq=False)
class Link:
    """One end of a link; `told` hears what the other end tells of itself.

    Without a `heart` only the transport's end is the link's: the other end's process is this one's child. One that is
    silent, but whose kernel acknowledges what it is sent, is asked nothing until it is heard again; it is still served.
    """

    transport: Transport
    peer: Peer
    serves: Services = field(factory=dict)
    lost_error: type[RequestError] = LinkLost
    heart: Heartbeat | None = None
    hearts: HeartbeatTask | None = None  # what tends it together with others; without it the link does
    acknowledged_s: Callable[[], float | None] = lambda: None  # as `Liveness` asks for it
    on_stalled: Callable[[], None] = lambda: None  # runs whenever `stalled` changes
    told: Callable[[Message], None] | None = None
    queued_bytes_max: int = 256 * 1024 * 1024
    release_s: float = 10.0
    _asked: dict[int, Replies] = field(factory=dict)
    _rules: dict[int, ReplyRules] = field(factory=dict)
    _left: set[int] = field(factory=set)  # streams whose asker has left, and whose answer has not ended yet
    _serving: dict[int, _Serving] = field(factory=dict)
    _writer: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _permits: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _ready: trio.Event = field(factory=trio.Event)
    _carrying: trio.CancelScope = field(factory=trio.CancelScope)
    _failure: PeerLost | PeerViolation | None = None
    _over: trio.Event = field(factory=trio.Event)
    _bye: Bye | None = None
    _lost: bool = False
    _life: Liveness = field(init=False)
    _said_at: float = field(factory=trio.current_time)
    traffic: Traffic = field(factory=Traffic)

    def __attrs_post_init__(self) -> None:
        self._life = Liveness(self.acknowledged_s, self._stalled)

    # The asking side -------------------------------------------------------------------

    def open(self, request: Message, credit: int, to: str = "") -> tuple[int, Replies]:
        """Ask without waiting: the new stream's number and its answer; the other end hears how long the asker waits.

        Raises `Overloaded` if the other end serves as many streams as it may, `TooLarge` for a request that no frame
        holds, and the link's `lost_error` if it is lost or the other end stands still.
        """
        if self._lost:
            raise self.lost_error("the link is down")
        if self.stalled:
            raise self.lost_error(STALLED_DETAIL)
        if len(self.peer.asked) >= self.peer.asked.open_max:
            raise Overloaded(f"{len(self.peer.asked)} streams are open on this link")
        stream = self.peer.asked.last + 1
        body, attached, rules = encode_body(request), codec.attached(request), reply_rules(request)
        answer = self._asked[stream] = Replies(credit)
        self._rules[stream] = rules
        try:
            self._send(Open(stream, body, credit, to, remaining_ms(), sum(map(len, attached))), attached)
        except RequestError:  # too much is attached
            self._closed(stream)
            raise
        return stream, answer

    def leave(self, stream: int) -> None:
        """Stop caring about a stream: synchronous, idempotent, legal at any moment; its answer ends when it is free."""
        if not self._lost and self.peer.asked.state(stream) == "open":
            self._left.add(stream)
            self._send(Cancel(stream, "the asker left"))

    @asynccontextmanager
    async def ask(self, request: Message, credit: int, to: str = "") -> AsyncIterator[Replies]:
        """Ask, waiting for a free stream; leaving the context is leaving the answer."""
        await trio.lowlevel.checkpoint()
        while not self._lost and not self.stalled and len(self.peer.asked) >= self.peer.asked.open_max:
            self.traffic.waits += 1
            await self._permits.park()
        try:
            stream, answer = self.open(request, credit, to)
        except Exception:
            self._permits.unpark(count=1)  # the stream is still free, for the next of those who wait
            raise
        try:
            yield answer
        finally:
            self.leave(stream)
            answer.abandon()

    # The serving side ------------------------------------------------------------------

    async def _serve(
        self, stream: int, server: Askable[Message, Message, Message], request: Message, credit: int
    ) -> None:
        serving = self._serving[stream]
        last: End | Fail = Fail(stream, "left", "the asker left")
        try:
            try:
                with serving.scope:
                    async with server.ask(request, credit) as answer:
                        answer.credit += serving.granted
                        serving.answer = answer
                        result = await answer.relay(partial(self._put, stream))
                        last = End(stream, encode_body(result) if result is not None else b"")
                if serving.scope.cancelled_caught and trio.current_time() >= serving.scope.deadline:
                    last = failed(stream, DeadlineExceeded("the asker's time is up"))
            except* RequestError as group:
                last = failed(stream, first(group))
            # The answerer may still hold what it needs to let go of: the stream is closed when it has, not before.
            if serving.answer is not None:
                with trio.move_on_after(self.release_s, shield=True):
                    await serving.answer.over.wait()
                if isinstance(serving.answer.failure, EngineLost):  # also whoever left is to know what it has done
                    last = failed(stream, serving.answer.failure)
        finally:
            del self._serving[stream]
        if not self._lost:
            self._send(last)

    def _put(self, stream: int, reply: Message) -> None:
        if not self._lost:
            attached = codec.attached(reply)
            self._send(Item(stream, encode_body(reply), codec.units_of(reply), sum(map(len, attached))), attached)

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
                if self.heart is not None:
                    if (hearts := self.hearts) is None:
                        nursery.start_soon((hearts := HeartbeatTask()).run)
                    hearts.add(self, trio.current_time() + self.heart.heartbeat_s)
                try:
                    await self._read_frames(nursery, task_status)
                except PeerViolation as error:
                    self._failure = error
                finally:
                    self._end()  # at once: the tasks that serve may take their time, and must not send any more
                nursery.cancel_scope.cancel(reason="the link is lost")
        farewell = f"{self._bye.code}: {self._bye.detail}" if self._bye else "the other end closed the link"
        raise self._failure or PeerLost(printable(farewell))

    async def _read_frames(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        while data := await self._read():
            self._life.heard()
            self.traffic.received(len(data))
            received = 0
            for frame in self.peer.receive(data):
                if self._lost:  # the other end does not read, or was silent for too long: what it says no longer counts
                    return
                self._received(frame, nursery)
                if isinstance(frame, Hello):
                    self._ready.set()
                    self._permits.unpark_all()
                    task_status.started()
                if (received := received + (len(frame.tokens) if isinstance(frame, Step) else 1)) >= RECEIVED_A_TURN:
                    received = 0
                    await trio.lowlevel.checkpoint()
            if self.peer.ready:  # it has room again, or is owed a word
                self._writer.unpark()

    def bye(self, code: str, detail: str) -> None:
        """Tell the other end that this one ends the link, and why."""
        if not self._lost:
            self._send(Bye(code, detail))

    @property
    def lost(self) -> bool:
        """Whether the link is down; whoever still answers over it may take its time to let go."""
        return self._lost

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
                reply = codec.decode(frame.body, self.peer.attached)
                self._rules[frame.stream].reply(reply, frame.units)
                self._asked[frame.stream].put(reply, frame.units)
            case End():
                result = codec.decode(frame.body) if frame.body else None
                self._rules[frame.stream].end(result)
                self._closed(frame.stream).end(result)
            case Fail():
                asker_left = frame.stream in self._left
                self._closed(frame.stream).fail(failure(frame, asker_left=asker_left))
            case Open():
                self._opened(frame, nursery)
            case Cancel():
                if (serving := self._serving.get(frame.stream)) is not None:
                    serving.scope.cancel(reason=f"peer: {frame.reason}")
            case Credit():
                self._granted(frame)
            case Bye():
                self._bye = frame
                if frame.code == Draining.code:  # its node stops what still runs: whoever asked can go on elsewhere
                    for answer in self._asked.values():
                        answer.fail(Draining(frame.detail))
            case Announce():
                self._told(frame)

    def _opened(self, frame: Open, nursery: trio.Nursery) -> None:
        request = codec.decode(frame.body, self.peer.attached)
        server = self.serves.get((frame.to, type(request)))
        if server is None and not frame.to:
            raise PeerViolation(f"a {type(request).__name__} was asked of an end that serves none")
        if server is None:  # it may have been there a moment ago
            self._send(failed(frame.stream, NotReady(f"there is no {frame.to} here")))
            return
        within_s = inf if frame.within_ms is None else max(0, frame.within_ms) / 1000
        self._serving[frame.stream] = _Serving(trio.CancelScope(relative_deadline=within_s))
        nursery.start_soon(self._serve, frame.stream, server, request, frame.credit)

    def _told(self, frame: Announce) -> None:
        message = codec.decode(frame.body)
        if self.told is None:
            raise PeerViolation(f"a {type(message).__name__} was told to an end that asks for none")
        self.told(message)

    def _stepped(self, step: Step) -> None:
        if self.heart is not None:  # who may lie: what a Step says is not checked
            raise PeerViolation("a Step, which only an engine's host may send")
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
        del self._rules[stream]
        self._left.discard(stream)
        self._permits.unpark()
        return self._asked.pop(stream)

    def tell(self, message: Message) -> None:
        """Tell the other end something of this one, without being asked."""
        self.announce_encoded(codec.encode(message))

    def announce_encoded(self, body: bytes) -> None:
        """Tell the other end what others are told in the same words."""
        if not self._lost:
            self._send(Announce(body))

    @property
    def silent_s(self) -> float:
        """For how long nothing has come from the other end."""
        return self._life.silent_s

    @property
    def stalled(self) -> bool:
        """Whether the other end's process stands still: it is asked nothing, and what it has asked for goes on."""
        return self._life.stalled

    def _stalled(self) -> None:
        if self.stalled:
            for answer in self._asked.values():  # whoever asked leaves, and can go on elsewhere
                answer.fail(self.lost_error(STALLED_DETAIL))
            self._permits.unpark_all()
        self.on_stalled()

    def _send(self, frame: Frame, attached: tuple[memoryview, ...] = ()) -> None:
        self.peer.send(frame, attached)
        self._writer.unpark()
        if self.peer.queued_bytes > self.queued_bytes_max and not self._lost:
            # The other end is to blame, not whoever happened to send this: the link ends, and its sender hears so.
            self.lose(PeerViolation(f"the other end left {self.peer.queued_bytes} bytes unread"))

    async def _write(self) -> None:
        while True:
            while self.peer.ready and (data := self.peer.take(MESSAGE_BYTES_MAX)):
                try:
                    await self.transport.send_all(data)
                except trio.BrokenResourceError:
                    return  # the reader sees the end too, and says so
                self._said_at = trio.current_time()
                self.traffic.sent(len(data))
            await self._writer.park()

    def tend(self, due_at: float, now: float) -> float | None:
        """Say that this end is alive if nothing else has, and end the link if the other end is not."""
        if self._lost or (heart := self.heart) is None:
            return None
        if now >= self._said_at + heart.heartbeat_s - heart.early_s:
            self._send(KeepAlive())
            self._said_at = now
        if (why := self._life.lost(heart, due_at, now, self.ready)) is not None:
            self.lose(PeerLost(why))
            return None
        return min(self._said_at + heart.heartbeat_s, self._life.look_at)

    def lose(self, why: PeerLost | PeerViolation) -> None:
        """End the link at once: what the other end says does not count any more."""
        self._failure = self._failure or why
        self._end()
        self._carrying.cancel(reason=str(why))

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
        self._rules.clear()
        for answer in asked.values():
            answer.fail(self.lost_error("the link went down"))
        self._permits.unpark_all()
