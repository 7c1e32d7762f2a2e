"""One end of a link: many streams over one transport, in both directions at once.

`protocol.link.peer.Peer` holds all rules about the legality of frames, and does no I/O. `AskingHalf` and `ServingHalf`
turn frames into answers and answers into frames. This file moves bytes between them and wakes tasks, so that an actor
at the other end of a link is asked like an actor of this process.

Why it works: the reader never waits for a consumer. Every reply has been paid for with credit, a promise of buffer
space, so its delivery is synchronous and one slow stream holds up no other. The writer is one task, cancelled only with
the whole link, because half a message would break every stream. Sending is synchronous as well (it queues a frame and
wakes the writer), so it is possible in a cancelled task.

A link ends once, for one reason. From then on nothing is sent, arriving data are ignored, and all askers are failed;
only calls served by this end may take their time to release their resources. An illegal frame of the other end is a
`PeerViolation`. An illegal frame of this end is a bug of this node, a `LocalViolation`: it ends the link as well, but
is never reported as a fault of the other end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias, cast

import trio
from attrs import define, field

from protocol.errors import Draining, LinkLost, LocalViolation, PeerLost, PeerViolation, RequestError
from protocol.link import codec
from protocol.link.frames import (
    Announce,
    Bye,
    Cancel,
    Credit,
    End,
    Fail,
    Frame,
    Hello,
    Item,
    KeepAlive,
    Open,
    ReadsMemory,
    Step,
    Taken,
)
from protocol.link.peer import Peer
from protocol.messages.kind import Message
from supervisor.links.asking import AskingHalf, LinkAnswer
from supervisor.links.encoding import DETAIL_CHARACTERS_MAX
from supervisor.links.frame_writer import FrameWriter
from supervisor.links.heartbeat import Heartbeat, HeartbeatTask, Liveness
from supervisor.links.serving import Services, ServingHalf
from supervisor.links.tensor_road import Attachments, TensorRoad
from supervisor.links.traffic import LinkStatistics, Traffic
from supervisor.links.transport import Transport
from supervisor.printable import printable

log = logging.getLogger(__name__)

# Frames, and tokens of Steps, before other tasks may run: one message may hold a megabyte of them.
FRAMES_A_TURN = 256
STALLED_DETAIL = "the other end stands still"

EndReason: TypeAlias = PeerLost | PeerViolation | LocalViolation
Handlers: TypeAlias = Mapping[type[Frame], Callable[[Frame], None]]


@define(eq=False)
class Link:
    """One end of a link; `on_announcement` gets each unrequested message of the other end.

    Without a `heartbeat` the link ends only with its transport: the other end's process is a child of this one. With a
    heartbeat, a silent end gets no requests, and is still served while its kernel acknowledges bytes.
    """

    transport: Transport
    peer: Peer
    services: Services = field(factory=dict)
    lost_error: type[RequestError] = LinkLost  # the error for askers
    heartbeat: Heartbeat | None = None
    heartbeat_task: HeartbeatTask | None = None  # shared by many links; without it the link has its own
    acknowledged_s: Callable[[], float | None] = lambda: None  # see `Liveness`
    on_stalled: Callable[[], None] = lambda: None  # runs whenever `stalled` changes
    on_announcement: Callable[[Message], None] | None = None
    queued_bytes_max: int = 256 * 1024 * 1024
    release_s: float = 10.0
    road: TensorRoad = field(factory=Attachments)
    traffic: Traffic = field(factory=Traffic)
    received_bye: Bye | None = field(default=None, init=False)  # the other end's reason to end the link
    _asking: AskingHalf = field(init=False)
    _serving: ServingHalf = field(init=False)
    _liveness: Liveness = field(init=False)
    _writer: FrameWriter = field(init=False)
    _greeted: trio.Event = field(factory=trio.Event, init=False)
    _running: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _ended: EndReason | None = field(default=None, init=False)
    _over: trio.Event = field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._writer = FrameWriter(self.peer, self.transport, self.traffic, self.queued_bytes_max, self.abort)
        self._asking = AskingHalf(self.peer, self._writer, self.road, self.traffic, self._lost_error)
        self._serving = ServingHalf(self.peer, self._writer, self.services, self.road, self.release_s)
        self._liveness = Liveness(self.acknowledged_s, self._on_stalled)
        self.peer.check_attached = self._check_attached

    # What callers do ---------------------------------------------------------------------

    def open(self, request: Message, credit: int, to: str = "") -> tuple[int, LinkAnswer]:
        """Ask without waiting; return the request's number, for `cancel`, and its answer: see `AskingHalf.open`."""
        return self._asking.open(request, credit, to)

    def ask(self, request: Message, credit: int, to: str = "") -> AbstractAsyncContextManager[LinkAnswer]:
        """Ask, waiting for a free stream; leaving the context cancels the request: see `AskingHalf.ask`."""
        return self._asking.ask(request, credit, to)

    def cancel(self, number: int) -> None:
        """Cancel a request: synchronous, idempotent, legal at any moment."""
        self._asking.cancel(number)

    def announce(self, message: Message) -> None:
        """Send an unrequested message."""
        self.announce_encoded(codec.encode(message))

    def announce_encoded(self, body: bytes) -> None:
        """Send an encoded message, which several links may share."""
        self._writer.send(Announce(body))

    def send_bye(self, code: str, detail: str) -> None:
        """Announce the coming end of the link with its reason."""
        self._writer.send(Bye(code, detail))

    def abort(self, reason: EndReason) -> None:
        """End the link at once; `run` raises `reason` unless the link has ended already."""
        self._end(reason)
        self._running.cancel(reason=str(reason))

    def count_into(self, total: Traffic) -> None:
        """Count into a total of several links from now on, and add this link's counts to it."""
        self.traffic = self._writer.traffic = self._asking.traffic = total.add(self.traffic)

    # State -------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the other end's Hello has arrived."""
        return self.peer.hello is not None

    @property
    def stalled(self) -> bool:
        """Whether the other end's process is stalled: this end asks it nothing, and still serves it."""
        return self._liveness.stalled

    @property
    def silent_s(self) -> float:
        """The seconds since bytes arrived."""
        return self._liveness.silent_s

    @property
    def ended(self) -> EndReason | None:
        """The reason why the link has ended, None while it has not."""
        return self._ended

    @property
    def lost(self) -> bool:
        """Whether the link has ended; calls served by this end may still be releasing their resources."""
        return self._ended is not None

    async def wait_ready(self) -> None:
        """Wait for the other end's Hello."""
        await self._greeted.wait()

    async def wait_lost(self) -> None:
        """Wait for the end of the link."""
        await self._over.wait()

    def statistics(self) -> LinkStatistics:
        """Return the counts of this end at this moment."""
        streams = len(self.peer.asked), len(self.peer.served)
        return LinkStatistics(len(self._asking), len(self._serving), *streams, self.peer.queued_bytes)

    # Reading -----------------------------------------------------------------------------

    async def run(  # noqa: ASYNC128  # _on_hello calls started()
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Carry the link until it is cancelled, or raise the reason of its end.

        `started()` is called on the other end's Hello.
        """
        with self._running:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._writer.run)
                self._asking.nursery = nursery
                if self.heartbeat is not None:
                    if (task := self.heartbeat_task) is None:
                        nursery.start_soon((task := HeartbeatTask()).run)
                    task.add(self, trio.current_time() + self.heartbeat.heartbeat_s)
                reason: EndReason = PeerLost("this end was cancelled")
                try:
                    await self._read(self._handlers(nursery, task_status))
                    bye = self.received_bye
                    detail = "the other end closed the link" if bye is None else f"{bye.code}: {bye.detail}"
                    reason = PeerLost(printable(detail))
                except (PeerViolation, LocalViolation) as error:
                    reason = error
                finally:
                    self._end(reason)  # before the nursery ends: calls in service may run on, and must not send more
                nursery.cancel_scope.cancel(reason="the link has ended")
        if self._ended is not None:
            raise self._ended

    def _handlers(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> Handlers:
        """Return the handlers of frames from `Peer.receive_data`; none of them waits."""
        asking, serving = self._asking, self._serving
        handlers = {
            Hello: partial(self._on_hello, task_status),
            Item: asking.on_item,
            Step: asking.on_step if self.heartbeat is None else asking.on_gathered,
            End: asking.on_end,
            Fail: asking.on_fail,
            Open: partial(serving.on_open, nursery),
            Credit: serving.on_credit,
            Cancel: serving.on_cancel,
            Taken: asking.on_taken,
            ReadsMemory: self._on_reads_memory,
            Announce: self._on_announce,
            Bye: self._on_bye,
        }
        return cast("Handlers", handlers)  # each is called with frames of its own type

    async def _read(self, handlers: Handlers) -> None:
        """Handle frames until the transport ends; other tasks run after each message, and within a long one."""
        while (data := await self._receive()) and not self.lost:
            self._liveness.received()
            self.traffic.received(len(data))
            handled = 0
            for frame in self.peer.receive_data(data):
                if self._ended is not None:
                    return
                handlers[type(frame)](frame)
                if type(frame) is Step:
                    handled += len(frame.tokens)
                else:  # an announcement may take 20 ms to merge, so it has a turn of its own
                    handled += FRAMES_A_TURN if type(frame) is Announce else 1
                if handled >= FRAMES_A_TURN:
                    handled = 0
                    await trio.lowlevel.checkpoint()
            if self.peer.ready:  # attachments have room at the other end, or a `WindowUpdate` is due
                self._writer.wake()

    async def _receive(self) -> bytes | bytearray:
        try:
            return await self.transport.receive_some()
        except trio.BrokenResourceError:
            return b""

    def _on_hello(self, task_status: trio.TaskStatus[None], hello: Hello) -> None:
        if self.road.reader is not None and hello.memory is not None:
            assert self._asking.nursery is not None
            on_readable = partial(self._writer.send, ReadsMemory())
            self._asking.nursery.start_soon(self.road.reader.run, hello.memory, on_readable)
        self._greeted.set()
        self._asking.wake()
        task_status.started()

    def _on_reads_memory(self, _: ReadsMemory) -> None:
        if self.road.reader is None:
            raise PeerViolation("the other end reads the memory of an end that offers none")
        self.road.reader.offer()

    def _on_bye(self, bye: Bye) -> None:
        self.received_bye = bye
        # A draining node will stop its running calls, so askers continue elsewhere now.
        if bye.code == Draining.code:
            self._asking.fail_all(partial(Draining, bye.detail[:DETAIL_CHARACTERS_MAX]))

    def _on_announce(self, frame: Announce) -> None:
        message = codec.decode(frame.body)
        if self.on_announcement is None:
            raise PeerViolation(f"a {type(message).__name__} was announced to an end that takes no announcements")
        self.on_announcement(message)

    def _check_attached(self, frame: Open | Item) -> None:
        if isinstance(frame, Item):
            self._asking.check_attached(frame)
        else:
            codec.check_attached(frame.body, frame.attached)

    # Living and ending -------------------------------------------------------------------

    def beat(self, due_at: float, now: float) -> float | None:
        """Send a heartbeat if nothing else was sent, and end the link if the other end is lost; for `HeartbeatTask`."""
        if self._ended is not None or (heartbeat := self.heartbeat) is None:
            return None
        if now >= self._writer.last_sent_at + heartbeat.heartbeat_s - heartbeat.early_s:
            self._writer.send(KeepAlive())
            self._writer.last_sent_at = now
        if (why := self._liveness.loss_reason(heartbeat, due_at, now, self.ready)) is not None:
            self.abort(PeerLost(why))
            return None
        return min(self._writer.last_sent_at + heartbeat.heartbeat_s, self._liveness.check_at)

    def _on_stalled(self) -> None:
        self._asking.suspend(STALLED_DETAIL) if self.stalled else self._asking.resume()
        self.on_stalled()

    def _end(self, reason: EndReason) -> None:
        """Fail all askers and send nothing more; only the first reason counts."""
        if self._ended is not None:
            return
        self._ended = reason
        self._over.set()
        self._writer.closed = True
        self._asking.end("the link went down")
        if isinstance(reason, LocalViolation):
            log.error("a bug of this node ended a link", exc_info=reason)

    def _lost_error(self, detail: str) -> RequestError:
        return self.lost_error(detail)
