"""An engine's host process, for tests: a simulated engine at the far end of a link, with the frames of a real host."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import trio
from attrs import define, field, frozen

from actors.engines.blocks.block_log import BlockReader
from actors.engines.blocks.following import changes_of
from actors.engines.hosted_engine import HostedEngine
from actors.engines.simulated.step import BatchUpdate
from protocol.errors import AskerLeft, EngineLost, PeerLost, PeerViolation, RequestError
from protocol.link import codec
from protocol.link.frames import Begun, Bye, Cancel, End, Ended, Fail, Frame, Item, Open, Step
from protocol.link.peer import Peer
from protocol.messages.engine import Alive, Done, EngineInfo, EngineLoad, GetInfo, GetLoad, Ping, WatchLoad
from protocol.messages.generation import Generate, Logprob, Started, Tokens
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks
from supervisor.links.link import Link
from tests.rig.fake_engine import Costs, FakeEngine, Scheduler
from tests.rig.network import SimTransport, sim_pair

TOGETHER_S = 0.005  # after a change of blocks, in which others are sent together
CONTROL_STREAMS = 16  # beside one stream a slot and one a place in the queue, as in the real host


@define(eq=False)
class FakeHost:
    """The far end of a link to an engine: it sends the frames of a real host, one `Step` for each turn of the engine."""

    transport: SimTransport
    costs: Costs = field(factory=Costs)
    engine: FakeEngine = field(init=False)
    peer: Peer = field(init=False)
    farewell: Bye | None = None
    streams: dict[int, str] = field(init=False, factory=dict)
    numbers: dict[str, int] = field(init=False, factory=dict)
    alone: set[str] = field(init=False, factory=set)  # requests whose replies are in no `Step`, behind attachments
    watchers: dict[int, trio.CancelScope] = field(init=False, factory=dict)  # by stream
    _nursery: trio.Nursery = field(init=False)
    _writer: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.engine = self._engine()
        self.engine.deliver = self._told
        self.peer = Peer("fake", serves_max=self.costs.slots + self.costs.waiting_max + CONTROL_STREAMS)

    def _engine(self) -> FakeEngine:
        return FakeEngine(self.costs)

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def crash(self) -> None:
        """Die as a killed process does: the link is cut without a `Bye`."""
        self.engine.crash()
        self.transport.cut()

    async def run(self) -> None:
        """Serve until either end ends the link."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write, name="host.write")
                nursery.start_soon(self.engine.run, name="host.engine")
                while data := await self.transport.receive_some():
                    for frame in self.peer.receive_data(data):
                        self._received(frame)
                    if self.peer.ready:  # it answers some frames by itself
                        self._writer.unpark_all()
                nursery.cancel_scope.cancel()
        finally:
            self.transport.close()

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                request = codec.decode(frame.body, self.peer.attached)
                if isinstance(request, Generate):
                    self.streams[frame.stream] = request.id
                    self.numbers[request.id] = frame.stream
                    self._start(request)
                elif isinstance(request, WatchBlocks | WatchLoad):
                    scope = self.watchers[frame.stream] = trio.CancelScope()
                    self._nursery.start_soon(self._watch, frame, request, scope, name="host.watch")
                else:
                    self._control(frame.stream, request)
            case Cancel() if frame.stream in self.streams and not self.engine.crashed:
                self.engine.abort(self.streams[frame.stream])
            case Cancel() if frame.stream in self.watchers:
                self.watchers[frame.stream].cancel()
            case Bye():
                self.farewell = frame
            case _:
                pass

    def _start(self, request: Generate) -> None:
        try:
            self.engine.start(request)
        except RequestError as error:
            self._send(Fail(self._forget(request.id), error.code, error.detail))

    def _control(self, stream: int, request: Message) -> None:
        match request:
            case GetInfo():
                result: Message = self.engine.info
            case GetLoad():
                result = EngineLoad.of_ranks([self.scheduler.load()]).totals
            case Ping():
                result = Alive()
            case _:
                self._nursery.start_soon(self._operate, stream, request, name="host.operate")
                return
        self._send(End(stream, codec.encode(result)))

    async def _operate(self, stream: int, request: Message) -> None:
        try:
            self._send(End(stream, codec.encode(await self.engine.operate(request))))
        except RequestError as error:
            self._send(Fail(stream, error.code, error.detail, error.param))

    async def _watch(self, frame: Open, request: WatchBlocks | WatchLoad, scope: trio.CancelScope) -> None:
        """Answer one stream as `actors.engines.host.watchers` does."""
        with scope:
            if isinstance(request, WatchBlocks):
                await self._send_blocks(frame, request)
            else:
                await self._send_loads(frame)
        if not self._nursery.cancel_scope.cancel_called:
            del self.watchers[frame.stream]
            left = scope.cancelled_caught
            done = End(frame.stream, codec.encode(Done()))
            self._send(Fail(frame.stream, AskerLeft.code, "the asker left") if left else done)

    async def _send_blocks(self, frame: Open, request: WatchBlocks) -> None:
        log, left = self.engine.blocks, frame.credit
        reader = BlockReader(log, request.life, request.since)
        with changes_of(log) as changed:
            while left > 0:
                if (events := reader.read(left)) is not None:
                    self._send(Item(frame.stream, codec.encode(events), 1))
                    left -= 1
                    await trio.sleep(TOGETHER_S if reader.is_caught_up else 0)
                else:
                    await changed.park()

    async def _send_loads(self, frame: Open) -> None:
        left = frame.credit

        def send(loads: EngineLoad) -> None:
            nonlocal left
            self._send(Item(frame.stream, codec.encode(loads), 1))
            left -= 1
            if not left:
                done.cancel()

        with trio.CancelScope() as done, suppress(EngineLost):
            await self.engine.watch_load(send)

    def _told(self, update: BatchUpdate) -> None:
        self._send_alone(update)
        begun = [
            Begun(self.numbers[request_id], beginning.cached_tokens, beginning.version)
            if isinstance(beginning, Started)
            else Begun(self.numbers[request_id], 0, beginning.version, continues=True)
            for request_id, beginning in update.begun
            if not (isinstance(beginning, Started) and beginning.hand_off) and request_id not in self.alone
        ]
        emitted = zip(update.emitted, update.tokens, update.logprobs, strict=True)
        steps = [(self.numbers[name], token, logprob) for name, token, logprob in emitted if name not in self.alone]
        logprobs: dict[int, tuple[Logprob, ...]] = {stream: (each,) for stream, _, each in steps if each is not None}
        ended = [
            Ended(
                self._forget(request_id),
                finished.reason,
                finished.usage.prompt_tokens,
                finished.usage.completion_tokens,
                finished.usage.cached_tokens,
                finished.matched,
            )
            for request_id, finished in update.ended
            if request_id not in self.alone
        ]
        if steps:
            streams, tokens, _ = map(list, zip(*steps, strict=True))
            self._send(Step(streams, [1] * len(streams), tokens, begun, ended, logprobs))
        for request_id, finished in update.ended:
            if request_id in self.alone:
                self._send(End(self._forget(request_id), codec.encode(finished)))
        for request_id, error in update.failed:
            self._send(Fail(self._forget(request_id), error.code, error.detail))

    def _send_alone(self, update: BatchUpdate) -> None:
        """Send what is in no `Step`: states, and the answers with log probabilities of their prompts."""
        for request_id, beginning in update.begun:
            if isinstance(beginning, Started) and beginning.scores is not None:
                self.alone.add(request_id)
            if request_id in self.alone or (isinstance(beginning, Started) and beginning.hand_off):
                self._reply(self.numbers[request_id], beginning)
        for request_id, token, logprob in zip(update.emitted, update.tokens, update.logprobs, strict=True):
            if request_id in self.alone:
                assert logprob is not None
                self._reply(self.numbers[request_id], Tokens((token,), (logprob,)))

    def _forget(self, request_id: str) -> int:
        self.alone.discard(request_id)
        stream = self.numbers.pop(request_id)
        del self.streams[stream]
        return stream

    def _reply(self, stream: int, reply: Started | Tokens) -> None:
        attached = codec.attached(reply)
        item = Item(stream, codec.encode(reply), codec.units_of(reply), sum(map(len, attached)))
        self._send(item, attached)

    def _send(self, frame: Frame, attached: tuple[memoryview, ...] = ()) -> None:
        self.peer.send(frame, attached)
        self._writer.unpark_all()

    async def _write(self) -> None:
        while True:
            while data := self.peer.data_to_send():
                try:
                    await self.transport.send_all(data)
                except trio.BrokenResourceError:
                    return
            await self._writer.park()


@frozen
class Far:
    """An engine behind a link, its adapter, and the link."""

    engine: HostedEngine
    host: FakeHost
    link: Link
    transport: SimTransport


@asynccontextmanager
async def far_engine(
    costs: Costs | None = None, rng: Random | None = None, delay_s: float = 0.0, **network: Any
) -> AsyncIterator[Far]:
    """Run an engine at the other end of a link, behind the real adapter, until the link ends."""
    near, far = sim_pair(rng, delay_s=delay_s, **network)
    host = FakeHost(far, costs or Costs())
    link = Link(near, Peer("node", serves_max=0), lost_error=EngineLost)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run, name="host")
        nursery.start_soon(_carry, link, name="link")
        await link.wait_ready()
        async with link.ask(GetInfo(), 0) as answer:
            info = await answer.result()
        assert isinstance(info, EngineInfo)
        yield Far(HostedEngine(link, info), host, link, near)
        nursery.cancel_scope.cancel()


async def _carry(link: Link) -> None:
    """Run a link to its end, whatever that is, short of a broken protocol."""
    try:
        await link.run()
    except PeerLost:
        pass
    except PeerViolation as error:
        raise AssertionError("two honest ends accused each other") from error
