"""A router over workers with scripted answers, in virtual time."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from math import inf
from typing import Any

import pytest
import trio
from attrs import Factory, define, evolve, field, frozen
from trio.testing import wait_all_tasks_blocked

from actors.engines.simulated.hand_off import HAND_OFF, Rendezvous
from actors.engines.simulated.spec import SimulatedSpec
from actors.kit.fast_path import put_token
from actors.router import router
from actors.routing.load import Load
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.pools.service_levels import ServiceLevels
from actors.routing.reservations import ReservationStatistics
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.errors import (
    ActorLost,
    AskerLeft,
    Draining,
    EngineLost,
    HandOffFailed,
    LinkLost,
    NotReady,
    Overloaded,
    RequestError,
)
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo, HandOff
from protocol.messages.generation import (
    Finished,
    FinishReason,
    Generate,
    Logprob,
    Sampling,
    Started,
    Tokens,
    Usage,
    one_token,
)
from protocol.pairing import Pairing
from protocol.token_ids import TokenIds
from supervisor.engines.work import RequestInbox, request_inbox
from supervisor.node.model_children import waiting_group
from tests.rig.calls import AnyAddress, AnyAnswer
from tests.rig.prompt_scores import scores_of

EOS = 0
PROMPT = [5, 6, 7, 8]
LOSSES = [ActorLost, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded]


def text(prompt: Sequence[int], length: int = 1000) -> list[int]:
    """Return what every fake worker answers to a prompt, up to its end-of-sequence token."""
    return [1 + (sum(prompt) * 7 + place * 13) % 89 for place in range(length)] + [EOS]


@frozen
class Play:
    """What a fake worker answers: so many tokens, a second each, and then an error, if any."""

    error: RequestError | None = None
    tokens: int = 10**6
    started: bool = True
    cached: int = 0
    length: int = 1000
    at_once: bool = False  # the error comes with the last of the tokens, in the same turn
    usage: Usage | None = None  # that it claims in the end; None: the truth
    state: bytes = b""  # of a prompt, behind which no token comes
    version: str = ""  # of its weights
    renewed: tuple[str, int] | None = None  # another version, and the number of tokens before it


@define(eq=False)
class Fake:
    """A worker with scripted answers; without a script it answers in full."""

    name: str
    plays: list[Play] = Factory(list)
    leg: Leg = Leg.BOTH
    slots: int = 4
    otherwise: Play = Play()
    info: EngineInfo | None = None
    busy: int = 0
    more: int = 0  # requests of others
    release_s: float = 0.0  # of a request that was left
    asked: list[Generate] = Factory(list)
    times: list[float] = Factory(list)
    left: list[float] = Factory(list)
    has_begun: list[str] = Factory(list)
    pool: FakePool = field(init=False)

    @property
    def full_name(self) -> str:
        return self.name

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy + self.more, self.slots)

    def begun(self, request_id: str) -> None:
        self.has_begun.append(request_id)

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[AnyAnswer]:
        self.busy += 1
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.asked.append(request)
            self.times.append(trio.current_time())
            answer = AnyAnswer(credit)
            scope = trio.CancelScope()
            play = self.plays.pop(0) if self.plays else self.otherwise
            self.pool.stage.start_soon(self._hold if play.state else self._play, request, play, answer, scope)
            try:
                yield answer
            finally:
                scope.cancel()
                if not answer.over.is_set():
                    self.left.append(trio.current_time())
                answer.abandon()
        finally:
            self.busy -= 1
            self.pool.change()

    async def _hold(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        """Return a state after a second, and hold it until it is left, or until the error half a second later."""
        with scope:
            await trio.sleep(1)
            answer.put(Started(play.cached, hand_off=play.state, scores=scores_of(request)), 0)
            await trio.sleep(inf if play.error is None else 0.5)
        answer.fail(play.error if play.error is not None and not scope.cancelled_caught else AskerLeft("left"))

    async def _play(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        prefill = self.leg is Leg.PREFILL
        wanted, sent = request.sampling, request.resumed_tokens
        whole = text(request.tokens[: len(request.tokens) - sent], play.length)[sent:]
        ends = {*wanted.stop_token_ids} if wanted.ignore_eos else {EOS, *wanted.stop_token_ids}
        most = 1 if prefill else wanted.tokens_max
        with scope:
            for number, token in enumerate(whole[: play.tokens], start=1):
                await trio.sleep(1)
                if number == 1 and play.started:
                    answer.put(Started(play.cached, scores=scores_of(request), version=play.version), 0)
                if play.renewed is not None and number == play.renewed[1] + 1:
                    answer.put(Tokens((), version=play.renewed[0]), 0)
                if request.logprobs is None:
                    put_token(answer, token, trio.current_time(), one_token)
                else:
                    answer.put(Tokens((token,), (Logprob(-token / 8),)))
                stops = token in ends and number > wanted.tokens_min
                if play.error is not None and play.tokens == number and play.at_once:
                    answer.fail(play.error)
                elif stops or number == most:
                    usage = play.usage or Usage(len(request.tokens), number, play.cached)
                    reason = FinishReason.STOP if stops else FinishReason.LENGTH
                    answer.end(Finished(reason, usage, token if stops else None))
                if answer.over.is_set():
                    return
            await trio.sleep(0.5)
            if play.error is not None:
                answer.fail(play.error)
        if scope.cancelled_caught:
            await trio.sleep(self.release_s)
            answer.fail(AskerLeft("the asker left"))


@frozen
class Loads:
    """Candidates of a policy: these loads, in no order."""

    every: Sequence[Load]

    def __iter__(self) -> Iterator[Load]:
        return iter(self.every)

    def leading(self, _: Generate) -> Sequence[Load]:
        return self.every

    def find(self, name: str) -> Load | None:
        return next((load for load in self.every if load.name == name), None)


@define(eq=False)
class ActorWorker:
    """A worker whose answers are those of an actor; it counts the requests that the actor has."""

    name: str
    pool: FakePool
    slots: int
    leg: Leg = Leg.BOTH
    info: EngineInfo | None = None
    busy: int = 0
    asked: list[str] = Factory(list)
    address: AnyAddress = field(init=False)

    @property
    def full_name(self) -> str:
        return self.name

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy, self.slots)

    def begun(self, request_id: str) -> None:
        """It has room for any prompts."""

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[AnyAnswer]:
        self.busy += 1
        self.asked.append(request.id)
        try:
            async with self.address.ask(request, credit) as answer:
                yield answer
        finally:
            self.busy -= 1
            self.pool.change()


@define(eq=False)
class FakePool:
    """The workers of a test; `gone` are those that cannot be asked."""

    all: list[Any]  # of `Fake`, or what stands in for one
    stage: Any  # a nursery, or None if no worker is asked
    gone: set[str] = Factory(set)
    has: str | None = None  # which weights
    changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def workers(self) -> list[Any]:
        return [worker for worker in self.all if worker.name not in self.gone]

    def expected(self) -> dict[str, Leg]:
        return {worker.name: worker.leg for worker in self.all}

    def pairing(self) -> Pairing:
        infos = ((worker, worker.info) for worker in self.workers())
        return Pairing.of((worker.name, worker.leg, info.terms) for worker, info in infos if info is not None)

    def lacking(self, adapter: Adapter) -> set[str] | None:
        having = {worker.name for worker in self.all if worker.info and adapter in worker.info.adapters}
        return {worker.name for worker in self.all} - having if having else None

    def weights(self) -> str | None:
        return self.has

    async def wait_changed(self) -> None:
        await self.changed.park()

    def wake(self) -> None:
        self.changed.unpark_all()

    def change(self, *gone: str) -> None:
        self.gone = set(gone) if gone else self.gone
        self.changed.unpark_all()

    def back(self) -> None:
        self.gone = set()
        self.changed.unpark_all()


@frozen
class RouterRig:
    """A router over workers."""

    address: AnyAddress
    pool: FakePool
    routing: Routing
    inbox: RequestInbox

    def worker(self, name: str) -> Any:
        return next(worker for worker in self.pool.all if worker.name == name)

    def check_at_rest(self) -> None:
        assert [worker.busy for worker in self.pool.all] == [0] * len(self.pool.all)
        assert self.inbox.waiting == (0, 0)
        assert self.routing.statistics() == ReservationStatistics(requests=0, prompts_pending=0)
        assert self.routing.waiting.lines == 0
        assert self.routing.shares.statistics() == {}


@asynccontextmanager
async def routed(
    *workers: Fake,
    inbox_size: int = 64,
    limits: FailoverLimits | None = None,
    prefill_tokens_min: int = 0,
    levels: ServiceLevels | None = None,
    early: Sequence[Generate] = (),
    kept_slots: int = 0,
) -> AsyncIterator[RouterRig]:
    """Run a router over workers; the `early` requests come before it begins."""
    ids, rng = count(1), random.Random(0)
    levels = levels or ServiceLevels()
    address, inbox = request_inbox(inbox_size, partial(waiting_group, levels))
    async with trio.open_nursery() as stage:
        pool = FakePool(list(workers), stage)
        for worker in workers:
            worker.pool = pool
        routing = Routing(
            pool=pool,
            policy=least_loaded,
            limits=limits or FailoverLimits(),
            new_number=lambda: rng.getrandbits(63),
            new_id=lambda: f"new {next(ids)}",
            prefill_tokens_min=prefill_tokens_min,
            ends=frozenset({EOS}),
            levels=levels,
            hand_offs={"simulated": HAND_OFF},
            kept_slots=lambda: kept_slots,
        )
        rig = RouterRig(address, pool, routing, inbox)
        for request in early:
            stage.start_soon(ask, rig, request)
        await wait_all_tasks_blocked()
        await stage.start(router, inbox, routing)
        yield rig
        await wait_all_tasks_blocked()
        rig.check_at_rest()
        stage.cancel_scope.cancel()


def generate(
    name: str = "a", tokens_max: int = 6, prompt: Iterable[int] = PROMPT, logprobs: int | None = None, **sampling: Any
) -> Generate:
    return Generate(name, TokenIds.of(prompt), Sampling(tokens_max, **sampling), logprobs)


@frozen
class Received:
    """What an asker has received."""

    replies: list[Any]
    finished: Finished

    @property
    def ids(self) -> list[int]:
        return [token for reply in self.replies if isinstance(reply, Tokens) for token in reply.ids]


async def ask(rig: RouterRig, request: Generate, into: list[Any] | None = None) -> Received:
    replies = [] if into is None else into
    async with rig.address.ask(request, request.sampling.tokens_max) as answer:
        finished = await answer.relay(replies.append)
    assert isinstance(finished, Finished)
    return Received(replies, finished)


def check_whole(got: Received, request: Generate, length: int = 1000, cached: int = 0) -> None:
    """Check that an answer is what one worker alone would have answered."""
    expected = text(request.tokens, length)[: request.sampling.tokens_max]
    assert got.ids == expected
    assert [type(reply) for reply in got.replies] == [Started] + [Tokens] * len(expected)
    assert got.replies[0] == Started(cached)
    assert got.finished.usage == Usage(len(request.tokens), len(expected), cached)
    stopped = expected[-1] == EOS
    assert got.finished.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert got.finished.matched == (EOS if stopped else None)


async def check_ends(rig: RouterRig, failure: Exception | None) -> None:
    """Check that a request is answered whole, or fails with this very error."""
    if failure is None:
        check_whole(await ask(rig, generate()), generate())
        return
    with pytest.raises(type(failure)) as caught:
        await ask(rig, generate())
    assert caught.value is failure


def prefill_info(address: bytes = b"p", ranks: int = 1, hand_off: HandOff = HandOff.CONCURRENT) -> EngineInfo:
    """Return the info of a simulated prefill with this address."""
    return evolve(SimulatedSpec(leg=Leg.PREFILL, ranks=ranks, hand_off=hand_off).info, hand_off_address=address)


def met_at(request: Generate) -> Rendezvous:
    """Return the rendezvous of a leg's request."""
    return Rendezvous.decode(request.hand_off)


def pair(**decode_or_prefill: list[Play]) -> tuple[Fake, Fake]:
    """Return a prefill and a decode, each with its script."""
    prefill = Fake("p", leg=Leg.PREFILL, info=prefill_info(), plays=decode_or_prefill.get("prefill", []))
    return prefill, Fake("d", leg=Leg.DECODE, plays=decode_or_prefill.get("decode", []))
