"""The engine of most tests: the product's simulated engine, with answers that a test can compute.

`whole` computes an answer from the request alone. Costs and faults may change while the engine runs, and a test may look
at what it holds. Steps, slots, queues, KV memory and aborts are those of `actors.engines.simulated`: a second scheduler
here would be another one to keep true.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from math import inf
from typing import Any, Protocol, TypeVar
from zlib import crc32

import trio
from attrs import Factory, define, evolve, field, frozen

from actors.engines.blocks.block_log import BlockLog
from actors.engines.request_check import check_largest_token
from actors.engines.simulated.batch import Batch
from actors.engines.simulated.cache_events import CacheEvents
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.held_request import HeldRequest
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.kv_memory import Lease
from actors.engines.simulated.output import OutputGenerator, OutputSequence
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import Costs as Prices
from actors.engines.simulated.spec import Faults, SimulatedSpec
from actors.engines.simulated.step import BatchUpdate
from protocol.errors import EngineDied, EngineRefused, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import Finished, FinishReason, Generate, Logprob, Sampling, Usage
from protocol.messages.media import MediaInfo
from protocol.token_ids import TokenIds

FORCED = 100.0
RequestKey = tuple[tuple[int, ...], int | None]  # a prompt and a seed


def generate(request_id: str = "r", prompt: int = 4, tokens_max: int = 3, **sampling: Any) -> Generate:
    """Return a request whose prompt has `prompt` tokens, which depend on its id."""
    start = crc32(request_id.encode()) % 50
    tokens = [(start + place * 7) % 97 for place in range(prompt)]
    return Generate(request_id, TokenIds.of(tokens), Sampling(tokens_max, **sampling))


def token_at(prompt: list[int], place: int, vocabulary_size: int = 100) -> int:
    """Return the token at `place` of every test engine's answer to `prompt`."""
    return crc32(repr((prompt, place)).encode()) % vocabulary_size


def logprob_at(token: int, place: int, top: int, vocabulary_size: int = 100) -> Logprob:
    """Return the log probability of a token at `place`, and those of the `top` likeliest, of which it is the first."""
    logprob = -0.5 - place % 7 / 16
    likeliest = [(token, logprob), *(((token + more) % vocabulary_size, logprob - 1 - more) for more in range(1, top))]
    return Logprob(logprob, tuple(likeliest[:top]))


def prompt_of(request: Generate) -> tuple[int, ...]:
    """Return a request's prompt, without the tokens that a lost worker has answered already."""
    return tuple(request.tokens[: len(request.tokens) - request.resumed_tokens])


def answer_to(request: Generate, vocabulary_size: int = 100, media: MediaInfo | None = None) -> Iterator[int]:
    """Yield the token ids of an answer, without end; another seed gives another answer, and so does another image."""
    wanted = request.sampling
    never = {token for token, bias in wanted.logit_bias.items() if bias <= -FORCED}
    never |= set() if media is None else {media.image_token or 0, media.video_token or 0}
    forced = next((token for token, bias in wanted.logit_bias.items() if bias >= FORCED), None)
    prompt = [*prompt_of(request), *([] if wanted.seed is None else [wanted.seed])]
    prompt += [int(item.digest, 16) for item in request.media]
    for place in count(request.resumed_tokens):
        token = token_at(prompt, place, vocabulary_size) if forced is None else forced
        while token in never:
            token = (token + 1) % vocabulary_size
        yield token


def whole(request: Generate, vocabulary_size: int = 100) -> tuple[list[int], Finished]:
    """Return the token ids and the end of an answer that nothing disturbs."""
    wanted, ids = request.sampling, []
    for token in answer_to(request, vocabulary_size):
        ids.append(token)
        stops = token in wanted.stop_token_ids and len(ids) > wanted.tokens_min
        if stops or len(ids) == wanted.tokens_max:
            break
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    return ids, Finished(reason, Usage(len(request.tokens), len(ids)), ids[-1] if stops else None)


class CacheWatch(Protocol):
    """What a test observes of the prefix caches of engines."""

    def begin(self) -> CacheEvents:
        """Return where another engine notes the changes of its cache."""

    def admitted(self, events: CacheEvents, held: HeldRequest) -> None:
        """A request begins to compute what it has not found in the cache."""


@define
class Costs:
    """Sizes, prices (seconds) and faults of one engine; they may change while it runs."""

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
    prefix_cache: bool = False
    caches: CacheWatch | None = None
    slow: float = 1.0  # so many times slower than stated
    stuck: bool = False  # aborted requests keep their slots for ever
    refused: Callable[[str], bool] = lambda _: False  # ids that it finds wrong only after it has admitted them
    leg: Leg = Leg.BOTH
    hand_off: HandOff = HandOff.CONCURRENT
    media: MediaInfo | None = None
    adapters_max: int = 0
    experts: int = 0

    @property
    def spec(self) -> SimulatedSpec:
        return SimulatedSpec(
            leg=self.leg,
            hand_off=self.hand_off,
            slots=self.slots,
            waiting_max=self.waiting_max,
            kv_tokens_max=self.kv_tokens_max,
            context_max=self.context_max,
            page_size=self.page_size,
            prefix_cache=self.prefix_cache,
            vocabulary_size=self.vocabulary_size,
            media=self.media,
            adapters_max=self.adapters_max,
            experts=self.experts,
            costs=Prices(release_s=self.release_s),
        )

    @property
    def info(self) -> EngineInfo:
        return self.spec.info


@frozen
class Predictable(OutputGenerator):
    """The output that `whole` computes."""

    def answer(self, request: Generate, prompt: bytes) -> OutputSequence:  # it is in the request, too
        ids = answer_to(request, self.spec.vocabulary_size, self.spec.media)
        return OutputSequence(ids, frozenset(request.sampling.stop_token_ids), b"", greedy=True)

    def logprob(self, sequence: OutputSequence, place: int, token: int, top: int) -> Logprob:
        return logprob_at(token, place - 1, top, self.spec.vocabulary_size)


@define(eq=False)
class Scheduler(Batch):
    """A `Batch` whose costs and faults may change at any moment, and which records what happens to requests."""

    live: Costs = field(kw_only=True)
    log: list[str] = Factory(list)
    given: dict[RequestKey, int] = Factory(dict)  # how many tokens
    fails: RequestError | None = None  # every request at its next token, while this is set
    failed: int = 0  # requests that did
    silent: set[str] = Factory(set)  # ids that get no further token, and keep their slots
    looked_up: dict[str, Lease] = Factory(dict)  # the pages with which requests have begun
    keeps_s: float = 0.0  # how much longer than it should the next slot is kept whose request is aborted

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.live.caches is not None:
            self.memory.events = self.live.caches.begin()

    def prompt_of(self, request: Generate) -> tuple[int, ...]:
        """Return a request's prompt, by which its tokens are counted."""
        return prompt_of(request)

    @property
    def requests(self) -> list[Generate]:
        """Every request that runs or waits."""
        return [held.request for held in (*self.running.values(), *self.waiting.values())]

    def holds(self, request_id: str) -> bool:
        return request_id in self.running or request_id in self.waiting

    def submit(self, request: Generate, now: float) -> None:
        self.log.append(f"submit {request.id}")
        super().submit(request, now)

    def abort(self, request_id: str, now: float) -> None:
        held = self.running.get(request_id) or self.waiting.get(request_id)
        if held is not None and held.free_at == inf:
            self.log.append(f"abort {request_id}")
            self.faults = Faults(stuck=float(self.live.stuck))
            super().abort(request_id, now)
            if not request_id.startswith("canary"):  # which is nobody's
                held.free_at += self.keeps_s
                self.keeps_s = 0.0

    def _plan(self, due: float, now: float) -> None:
        super()._plan(due, now)
        if (caches := self.live.caches) is None or self._step is None:
            return
        for held, _ in self._step.pieces:
            if not held.has_begun and self.looked_up.get(held.request.id) is not held.lease:
                assert held.lease is not None
                self.looked_up[held.request.id] = held.lease
                caches.admitted(self.memory.events, held)

    def next_at(self) -> float:
        self.faults = Faults(stuck=float(self.live.stuck))
        return super().next_at()

    def _begin(self, held: HeldRequest, update: BatchUpdate) -> None:
        if self.live.refused(held.request.id):
            self._fail(held, EngineRefused("the engine does not like it"), update)
        elif self.fails is None:
            super()._begin(held, update)
        else:
            self._fail_as_all(held, update)

    def _emit(self, held: HeldRequest, update: BatchUpdate) -> None:
        if self.fails is not None:
            self._fail_as_all(held, update)
            return
        if held.request.id in self.silent:
            return
        super()._emit(held, update)
        if self.spec.leg is not Leg.PREFILL:
            asked = self.prompt_of(held.request), held.request.sampling.seed
            self.given[asked] = held.request.resumed_tokens + len(held.output)

    def _fail_as_all(self, held: HeldRequest, update: BatchUpdate) -> None:
        assert self.fails is not None
        self.failed += 1
        self._fail(held, self.fails, update)

    def _drop(self, held: HeldRequest) -> None:
        self.log.append(f"{'ended' if held.free_at == inf else 'released'} {held.request.id}")
        super()._drop(held)

    def _step_s(self, decoding: list[HeldRequest], pieces: list[tuple[HeldRequest, int]], prefill_tokens: int) -> float:
        return self.live.slow * (self.live.step_s + self.live.prefill_s * prefill_tokens)


class FakeEngine(SimulatedEngine):
    """An engine in this process, which returns where the product's raises `EngineDied`."""

    scheduler_of = Scheduler
    deliver: Callable[[BatchUpdate], None] | None = None

    def __init__(
        self,
        costs: Costs | None = None,
        rendezvous_rooms: RendezvousRooms | None = None,
        states: HeldStates | None = None,
    ) -> None:
        self.costs = costs or Costs()
        super().__init__(
            self.costs.spec,
            random.Random(0),
            rendezvous_rooms=rendezvous_rooms or RendezvousRooms(),
            states=HeldStates() if states is None else states,
        )
        self._info = evolve(self.costs.info, operations=self.info.operations)
        self.scheduler = self.scheduler_of(
            self.spec,
            self.make_output(),
            self.chance,
            rendezvous_rooms=self.rendezvous_rooms,
            states=self.states,
            wake=self._wake.unpark_all,
            version=lambda: self.weights.version,
            live=self.costs,
        )
        self._batches = (self.scheduler,)

    def make_output(self) -> Predictable:
        """Return what computes its answers."""
        return Predictable(self.spec)

    def check_whole(self) -> None:
        """Check that the engine has all of its memory, of which nothing is in use, and stands still for nothing."""
        memory = self.scheduler.memory
        assert not memory.referenced, "pages of memory are held"
        assert memory.pages_max == self.spec.pages, "an engine lacks memory"
        assert not self._memory.stands_still, "an engine stands still"
        assert not self._memory.updating, "an engine is left in an update"

    def start(self, request: Generate) -> None:
        """Start a request as a host does, whose node has checked it, and which takes all updates by `deliver`."""
        check_largest_token(max(request.tokens), self.info)
        self.scheduler.submit(request, trio.current_time())
        self._wake_if_due(self.scheduler)

    def _deliver(self, update: BatchUpdate) -> None:
        (self.deliver or super()._deliver)(update)

    @property
    def log(self) -> list[str]:
        return self.scheduler.log

    @property
    def blocks(self) -> BlockLog:
        """The log of what it tells of its prefix cache."""
        return self._blocks

    @property
    def crashed(self) -> bool:
        return self._lost.is_set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with suppress(EngineDied):
            await super().run(task_status=task_status)


SomeEngine = TypeVar("SomeEngine", bound=SimulatedEngine)


@asynccontextmanager
async def running_engine(engine: SomeEngine) -> AsyncIterator[SomeEngine]:
    """Run an engine while the body runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def near_engine(costs: Costs | None = None) -> AsyncIterator[FakeEngine]:
    """Run an engine in this process."""
    async with running_engine(FakeEngine(costs)) as engine:
        yield engine
