"""Links over a simulated network: two ends that ask each other, or one whose other end a test writes by hand."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import pytest
import trio
from attrs import Factory, define
from trio.testing import wait_all_tasks_blocked

from actors.kit.calls import BugCounter
from protocol.errors import LocalViolation, PeerLost, PeerViolation
from protocol.link import codec
from protocol.link.frames import ATTACHED_BYTES_MAX, VERSION, Frame, FrameReader, Hello, encode
from protocol.link.peer import Peer
from protocol.messages.engine import Done
from protocol.messages.generation import Tokens
from protocol.messages.kind import Kind, Message
from protocol.messages.operations import FlushCache
from supervisor.links.heartbeat import Heartbeat
from supervisor.links.link import EndReason, Link
from tests.rig.calls import AnyAnswer, AnyCall, AnyPriorityInbox, mailbox
from tests.rig.log_records import log_records
from tests.rig.network import SimTransport, sim_pair

Service: TypeAlias = Callable[[AnyCall, AnyAnswer], Awaitable[None]]


@contextmanager
def any_answer() -> Iterator[None]:
    """Let any message answer a FlushCache: few tests of links are about what may answer which request."""
    row = codec.ROWS[FlushCache]
    codec.ROWS[FlushCache] = Kind(row.number, FlushCache, (object,), object)  # type: ignore[arg-type]  # None, too
    try:
        yield
    finally:
        codec.ROWS[FlushCache] = row


async def serve(inbox: trio.MemoryReceiveChannel[AnyCall] | AnyPriorityInbox, service: Service) -> None:
    """Answer each call of an inbox in a task of its own, as an actor does."""
    bugs = BugCounter()

    async def answer(call: AnyCall) -> None:
        with call.answering(bugs) as replies:
            await service(call, replies)

    async with trio.open_nursery() as nursery:
        while True:
            nursery.start_soon(answer, await inbox.receive())


async def count_to_three(call: AnyCall, replies: AnyAnswer) -> None:
    """Reply with a token each second, three in all."""
    for number in range(3):
        await trio.sleep(1)
        replies.put(Tokens((number,)))
    replies.end(Done())


async def never_answer(call: AnyCall, replies: AnyAnswer) -> None:
    """Hold the call until it is cancelled."""
    await trio.sleep_forever()


def held_for(release_s: float, released: list[float] | None = None) -> Service:
    """Return a service that replies once and takes `release_s` to release a cancelled call; it records when it has."""

    async def service(call: AnyCall, replies: AnyAnswer) -> None:
        try:
            replies.put(Tokens((1,)))
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(release_s)
            if released is not None:
                released.append(trio.current_time())

    return service


async def ask(link: Link, credit: int = 9) -> tuple[list[Message], Message | None]:
    """Ask a FlushCache over a link, and return its replies and its result."""
    async with link.ask(FlushCache(), credit) as replies:
        received = [reply async for reply in replies]
        return received, await replies.result()


def idle_link() -> Link:
    """Return a link that is not run."""
    return Link(sim_pair()[0], Peer("here", serves_max=1))


@define(eq=False)
class Ends:
    """Both ends of a link, and how each of them ended."""

    asker: Link
    server: Link
    near: SimTransport
    far: SimTransport
    ended: dict[str, tuple[str, float]] = Factory(dict)

    async def run(self, name: str, link: Link) -> None:
        """Run one end until it is lost, and record why and when."""
        try:
            await link.run()
        except PeerLost as error:
            self.ended[name] = str(error), trio.current_time()

    def check_at_rest(self) -> None:
        """Check that neither end holds anything."""
        for link in (self.asker, self.server):
            held = link.statistics()
            assert (held.answers, held.calls, held.streams_asked, held.streams_served) == (0, 0, 0, 0)


def bugs_logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of links that a bug of this node has ended."""
    return [record for record in log_records(caplog) if record.message == "a bug of this node ended a link"]


@asynccontextmanager
async def linked(
    service: Service | None,
    *,
    streams: int = 4,
    inbox_size: int = 4,
    rng: random.Random | None = None,
    room: int = 65536,
    heartbeat: Heartbeat | None = None,
    acknowledges: bool = False,
    request: type[Message] = FlushCache,
    attached_bytes_max: int = ATTACHED_BYTES_MAX,
    **fields: Any,
) -> AsyncIterator[Ends]:
    """Two ends of a link that both answer a `request` by `service`, or never if it is None; `fields` of the first."""
    near, far = sim_pair(rng, delay_s=0.01 if rng else 0, piece_max=9 if rng else 65536, room=room)
    address, inbox = mailbox(inbox_size)
    links = []
    for name, transport, own_fields in (("asker", near, fields), ("server", far, {})):
        more = own_fields | ({"acknowledged_s": transport.acknowledged_s} if acknowledges else {})
        peer = Peer(name, serves_max=streams, attached_bytes_max=attached_bytes_max)
        links.append(Link(transport, peer, {("", request): address}, heartbeat=heartbeat, **more))
    ends = Ends(links[0], links[1], near, far)
    with any_answer():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.run, "asker", ends.asker)
            nursery.start_soon(ends.run, "server", ends.server)
            if service is not None:
                nursery.start_soon(serve, inbox, service)
            await ends.asker.wait_ready()
            await ends.server.wait_ready()
            yield ends
            nursery.cancel_scope.cancel()


@define(eq=False)
class HandWritten:
    """One end of a link, the transport of its other end, and the error with which it ended."""

    link: Link
    far: SimTransport
    ended: EndReason | None = None
    scope: trio.CancelScope = Factory(trio.CancelScope)  # around the link
    _reader: FrameReader = Factory(FrameReader)

    async def send(self, *frames: Frame | bytes) -> None:
        """Send frames, or other bytes, as the other end, and wait until nothing more happens."""
        await self.far.send_all(b"".join(frame if isinstance(frame, bytes) else encode(frame) for frame in frames))
        await wait_all_tasks_blocked()

    async def receive(self) -> list[Frame]:
        """Return the frames that this end sends next."""
        return list(self._reader.feed(bytes(await self.far.receive_some())))

    async def run(self) -> None:
        """Run the link until it ends, and record why."""
        try:
            with self.scope:
                await self.link.run()
        except (PeerLost, PeerViolation, LocalViolation) as error:
            self.ended = error


@asynccontextmanager
async def hand_written(
    *, room: int = 4096, acknowledges: bool = False, takes_steps: bool = True, **fields: Any
) -> AsyncIterator[HandWritten]:
    """A link whose other end is written by hand; both have sent their Hello."""
    near, far = sim_pair(room=room)
    fields |= {"acknowledged_s": near.acknowledged_s} if acknowledges else {}
    other = HandWritten(Link(near, Peer("here", serves_max=2), **fields), far)
    with any_answer():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.run)
            await other.send(Hello(VERSION, "there", 8, takes_steps))
            await other.link.wait_ready()
            await other.receive()
            yield other
            nursery.cancel_scope.cancel()
