"""A deterministic engine in virtual time, at hand or at the far end of a link."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from zlib import crc32

import trio
from attrs import Factory, define, field, frozen

from actors.engines.port import Generation
from actors.engines.request_check import check
from actors.engines.sglang.adapter import SglangEngine
from actors.kit.calls import Answer
from protocol import codec, messages
from protocol.codec import Message
from protocol.errors import AskerLeft, EngineLost, EngineRefused, Overloaded, PeerLost, PeerViolation, RequestError
from protocol.frames import Begun, Bye, Cancel, End, Ended, Fail, Frame, Open, Step
from protocol.messages import (
    Done,
    EngineInfo,
    EngineLoad,
    Finished,
    FinishReason,
    FlushCache,
    Generate,
    GetInfo,
    GetLoad,
    Logprob,
    Ping,
    Sampling,
    Usage,
)
from protocol.peer import Peer
from supervisor.links.link import Link
from tests.system.simulator import SimTransport, sim_pair

CONTROL_STREAMS = 16  # beside one stream a slot and one a place in the queue, as in the real host


def generate(request_id: str = "r", prompt: int = 4, tokens_max: int = 3, **sampling) -> Generate:
    """A request whose prompt is `prompt` tokens long and peculiar to its id."""
    start = crc32(request_id.encode()) % 50
    tokens = [(start + place * 7) % 97 for place in range(prompt)]
    return Generate(request_id, tokens, Sampling(tokens_max, **sampling))


def token_at(prompt: list[int], place: int, vocabulary_size: int = 100) -> int:
    """The token that every fake engine puts at `place` of its answer to `prompt`."""
    return crc32(repr((prompt, place)).encode()) % vocabulary_size


def logprob_at(token: int, place: int, top: int, vocabulary_size: int = 100) -> Logprob:
    """The log probability that every fake engine gives a token at `place`, and those of the likeliest: it comes first."""
    logprob = -0.5 - place % 7 / 16
    likeliest = [(token, logprob), *(((token + more) % vocabulary_size, logprob - 1 - more) for more in range(1, top))]
    return Logprob(logprob, tuple(likeliest[:top]))


def whole(request: Generate, vocabulary_size: int = 100) -> tuple[list[int], Finished]:
    """The ids and the end that a request gets when nothing goes wrong."""
    wanted, ids = request.sampling, []
    prompt = request.tokens[: len(request.tokens) - request.said]  # what was said goes on, it is not asked anew
    forced = next((token for token, bias in wanted.logit_bias.items() if bias >= 100), None)
    while len(ids) < wanted.tokens_max:
        token = token_at(prompt, request.said + len(ids), vocabulary_size) if forced is None else forced
        while wanted.logit_bias.get(token, 0) <= -100:
            token = (token + 1) % vocabulary_size
        ids.append(token)
        if ids[-1] in wanted.stop_token_ids and len(ids) >= wanted.tokens_min:
            return ids, Finished(FinishReason.STOP, Usage(len(request.tokens), len(ids)), ids[-1])
    return ids, Finished(FinishReason.LENGTH, Usage(len(request.tokens), len(ids)))


@define
class Costs:
    """What the fake engine is made of, and what is wrong with it; may change while it runs."""

    slots: int = 4
    step_s: float = 1.0  # one token for every request that runs
    prefill_s: float = 0.0  # a token of the prompt
    pending_prefill_max: int = 0  # prompt tokens that it is given before their first tokens
    release_s: float = 0.0  # from an abort to the free slot
    waiting_max: int = 16
    vocabulary_size: int = 100
    context_max: int = 512
    kv_tokens_max: int = 4096
    page_size: int = 16
    slow: float = 1.0  # so many times slower than stated
    stuck: bool = False  # aborted requests keep their slots for ever
    refused: Callable[[str], bool] = lambda _: False  # ids that it finds wrong only after it has admitted them

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            kind="fake",
            version="1",
            vocabulary_size=self.vocabulary_size,
            context_max=self.context_max,
            kv_tokens_max=self.kv_tokens_max,
            request_tokens_max=min(self.context_max - 6, self.kv_tokens_max - self.page_size),
            running_max=self.slots,
            page_size=self.page_size,
            honours_seed=True,
        )


@define(eq=False)
class _Held:
    """One request inside the engine, until its slot is free."""

    request: Generate
    ids: list[int]  # all that it will get
    finished: Finished
    ready_at: float = inf  # when its prompt is computed
    given: int = 0
    free_at: float = inf  # set by an abort

    @property
    def tokens_max(self) -> int:
        return len(self.request.tokens) + self.request.sampling.tokens_max


@frozen
class Turn:
    """What the engine says at one moment, by request id."""

    begun: list[str] = Factory(list)
    tokens: list[tuple[str, int]] = Factory(list)
    logprobs: dict[str, Logprob] = Factory(dict)
    ended: list[tuple[str, Finished]] = Factory(list)
    failed: list[tuple[str, RequestError]] = Factory(list)


@define(eq=False)
class Scheduler:
    """The engine itself: batches what runs, queues what does not fit, and tells what happens, turn by turn."""

    costs: Costs
    tell: Callable[[Turn], None]
    log: list[str] = Factory(list)
    waiting: deque[_Held] = Factory(deque)
    running: dict[str, _Held] = Factory(dict)
    crashed: trio.Event = field(factory=trio.Event)
    fails: RequestError | None = None  # every request at its next token, while this is set
    failed: int = 0  # requests that did
    keeps_s: float = 0.0  # how much longer than it should the next slot is kept whose request is aborted
    _step_began_at: float = -inf
    _step_ends_at: float | None = None
    _wake: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def submit(self, request: Generate) -> None:
        assert not self._find(request.id), "an id that is in use"
        self.log.append(f"submit {request.id}")
        self.waiting.append(_Held(request, *whole(request, self.costs.vocabulary_size)))
        self._wake.unpark_all()

    def abort(self, request_id: str) -> None:
        held = self._find(request_id)
        if held is not None and held.free_at == inf and not self.crashed.is_set():
            self.log.append(f"abort {request_id}")
            held.free_at = trio.current_time() + self.costs.release_s + self.keeps_s
            self.keeps_s = 0.0
            self._wake.unpark_all()

    def holds(self, request_id: str) -> bool:
        return self._find(request_id) is not None

    def crash(self) -> None:
        self.crashed.set()
        self._wake.unpark_all()

    def load(self) -> EngineLoad:
        used = sum(len(held.request.tokens) + held.given for held in self.running.values())
        return EngineLoad(len(self.running), len(self.waiting), used)

    async def run(self) -> None:
        """Compute until crashed."""
        while not self.crashed.is_set():
            self._release()
            self._admit()
            with trio.move_on_at(self._next_at()):
                await self._wake.park()
            now = trio.current_time()
            if not self.crashed.is_set() and self._step_ends_at is not None and self._step_ends_at <= now:
                self._step_ends_at = None
                self._step(now)

    def _find(self, request_id: str) -> _Held | None:
        queued = (held for held in self.waiting if held.request.id == request_id)
        return self.running.get(request_id) or next(queued, None)

    def _next_at(self) -> float:
        held = [*self.running.values(), *self.waiting]
        free_at = min((each.free_at for each in held), default=inf) if not self.costs.stuck else inf
        return min(free_at, inf if self._step_ends_at is None else self._step_ends_at)

    def _release(self) -> None:
        if self.costs.stuck:
            return
        now = trio.current_time()
        gone = [held.request.id for held in (*self.running.values(), *self.waiting) if held.free_at <= now]
        self.waiting = deque(held for held in self.waiting if held.request.id not in gone)
        for request_id in gone:
            self.running.pop(request_id, None)
            self.log.append(f"released {request_id}")
        if gone:
            self.tell(Turn(failed=[(request_id, AskerLeft("aborted")) for request_id in gone]))

    def _admit(self) -> None:
        now = trio.current_time()
        joins = self._step_ends_at is None or self._step_began_at == now
        while joins and self.waiting and len(self.running) < self.costs.slots:
            promised = sum(held.tokens_max for held in self.running.values())
            if promised + self.waiting[0].tokens_max > self.costs.kv_tokens_max:
                break
            held = self.waiting.popleft()
            held.ready_at = now + self.costs.prefill_s * len(held.request.tokens) * self.costs.slow
            self.running[held.request.id] = held
        if self._step_ends_at is None and any(held.free_at == inf for held in self.running.values()):
            self._step_began_at, self._step_ends_at = now, now + self.costs.step_s * self.costs.slow

    def _step(self, now: float) -> None:
        turn = Turn()
        for request_id, held in list(self.running.items()):
            if held.free_at != inf or held.ready_at > now:
                continue
            if self.costs.refused(request_id):
                turn.failed.append((request_id, EngineRefused("the engine does not like it")))
                self._ended(request_id)
                continue
            if self.fails is not None:
                self.failed += 1
                turn.failed.append((request_id, self.fails))
                self._ended(request_id)
                continue
            if held.given == 0:
                turn.begun.append(request_id)
            token = held.ids[held.given]
            turn.tokens.append((request_id, token))
            if (top := held.request.logprobs) is not None:
                place = held.request.said + held.given
                turn.logprobs[request_id] = logprob_at(token, place, top, self.costs.vocabulary_size)
            held.given += 1
            if held.given == len(held.ids):
                turn.ended.append((request_id, held.finished))
                self._ended(request_id)
        if turn != Turn():
            self.tell(turn)

    def _ended(self, request_id: str) -> None:
        del self.running[request_id]
        self.log.append(f"ended {request_id}")


@define(eq=False)
class FakeEngine:
    """Keeps the promises of `actors.engines.port.Engine` in this very process."""

    costs: Costs = field(factory=Costs)
    scheduler: Scheduler = field(init=False)
    _answers: dict[str, Generation] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(self.costs, self._told)

    @property
    def info(self) -> EngineInfo:
        return self.costs.info

    @property
    def log(self) -> list[str]:
        return self.scheduler.log

    @property
    def crashed(self) -> trio.Event:
        return self.scheduler.crashed

    def crash(self) -> None:
        """Die: every answer fails."""
        self.scheduler.crash()
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.fail(EngineLost("the engine crashed"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await self.scheduler.run()

    def submit(self, request: Generate) -> Generation:
        if self.crashed.is_set():
            raise EngineLost("the engine crashed")
        check(request, self.info)
        if len(self.scheduler.waiting) >= self.costs.waiting_max:
            raise Overloaded("the queue is full")
        self.scheduler.submit(request)
        answer = self._answers[request.id] = Answer(request.sampling.tokens_max)
        return answer

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    async def wait_released(self, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if (answer := self._answers.get(request_id)) is not None:
            await answer.over.wait()

    async def wait_lost(self):
        await self.crashed.wait()

    async def load(self) -> EngineLoad:
        await trio.lowlevel.checkpoint()
        if self.crashed.is_set():
            raise EngineLost("the engine crashed")
        return self.scheduler.load()

    async def flush_cache(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.scheduler.running or self.scheduler.waiting:
            raise Overloaded("requests run")

    def _told(self, turn: Turn) -> None:
        for request_id in turn.begun:
            self._answers[request_id].put(messages.Started(), 0)
        for request_id, token in turn.tokens:
            logprobs = (turn.logprobs[request_id],) if request_id in turn.logprobs else ()
            self._answers[request_id].put(messages.Tokens([token], logprobs))
        for request_id, finished in turn.ended:
            self._answers.pop(request_id).end(finished)
        for request_id, error in turn.failed:
            self._answers.pop(request_id).fail(error)


@define(eq=False)
class FakeHost:
    """A fake engine that speaks the frames of the real host: every turn of it is one `Step`."""

    transport: SimTransport
    costs: Costs = field(factory=Costs)
    scheduler: Scheduler = field(init=False)
    peer: Peer = field(init=False)
    farewell: Bye | None = None
    streams: dict[int, str] = field(init=False, factory=dict)
    numbers: dict[str, int] = field(init=False, factory=dict)
    _writer: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.scheduler = Scheduler(self.costs, self._told)
        self.peer = Peer("fake", serves_max=self.costs.slots + self.costs.waiting_max + CONTROL_STREAMS)

    def crash(self) -> None:
        """Die as a process dies: the link goes down, and nobody says why."""
        self.scheduler.crash()
        self.transport.cut()

    async def run(self) -> None:
        """Serve until the link ends, by whichever end."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, name="host.write")
                nursery.start_soon(self.scheduler.run, name="host.engine")
                while data := await self.transport.receive_some():
                    for frame in self.peer.receive(data):
                        self._received(frame)
                nursery.cancel_scope.cancel()
        finally:
            self.transport.close()

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                request = codec.decode(frame.body)
                if isinstance(request, Generate):
                    self.streams[frame.stream] = request.id
                    self.numbers[request.id] = frame.stream
                    self.scheduler.submit(request)
                else:
                    self._control(frame.stream, request)
            case Cancel() if frame.stream in self.streams:
                self.scheduler.abort(self.streams[frame.stream])
            case Bye():
                self.farewell = frame
            case _:
                pass

    def _control(self, stream: int, request: Message) -> None:
        match request:
            case GetInfo():
                result: Message = self.costs.info
            case GetLoad():
                result = self.scheduler.load()
            case Ping():
                result = Done()
            case FlushCache() if not (self.scheduler.running or self.scheduler.waiting):
                result = Done()
            case _:
                self._send(Fail(stream, Overloaded.code, "not now"))
                return
        self._send(End(stream, codec.encode(result)))

    def _told(self, turn: Turn) -> None:
        begun = [Begun(self.numbers[request_id], 0) for request_id in turn.begun]
        streams = [self.numbers[request_id] for request_id, _ in turn.tokens]
        logprobs = {self.numbers[request_id]: (each,) for request_id, each in turn.logprobs.items()}
        ended = [
            Ended(
                self._forget(request_id),
                finished.reason,
                finished.usage.prompt_tokens,
                finished.usage.completion_tokens,
                finished.usage.cached_tokens,
                finished.matched,
            )
            for request_id, finished in turn.ended
        ]
        if streams:
            tokens = [token for _, token in turn.tokens]
            self._send(Step(streams, [1] * len(streams), tokens, begun, ended, logprobs))
        for request_id, error in turn.failed:
            self._send(Fail(self._forget(request_id), error.code, error.detail))

    def _forget(self, request_id: str) -> int:
        stream = self.numbers.pop(request_id)
        del self.streams[stream]
        return stream

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self._writer.unpark_all()

    async def _write(self) -> None:
        while True:
            while data := self.peer.take():
                try:
                    await self.transport.send_all(data)
                except trio.BrokenResourceError:
                    return
            await self._writer.park()


@asynccontextmanager
async def near_engine(costs: Costs | None = None) -> AsyncIterator[FakeEngine]:
    """A fake engine at hand."""
    engine = FakeEngine(costs or Costs())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


@frozen
class Far:
    """A fake engine behind a link, and everything between."""

    engine: SglangEngine
    host: FakeHost
    link: Link
    transport: SimTransport


@asynccontextmanager
async def far_engine(costs: Costs | None = None, rng=None, delay_s: float = 0.0, **network) -> AsyncIterator[Far]:
    """A fake engine at the other end of a link, behind the real adapter; ends when the link does."""
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
        yield Far(SglangEngine(link, info), host, link, near)
        nursery.cancel_scope.cancel()


async def _carry(link: Link) -> None:
    """Run a link to its end, whatever that is, short of a broken protocol."""
    try:
        await link.run()
    except PeerLost:
        pass
    except PeerViolation as error:
        raise AssertionError("two honest ends accused each other") from error
