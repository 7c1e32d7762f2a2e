"""The embedder actor, in virtual time: its slots, its deadlines, and what becomes of its requests."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
import trio
from attrs import define, evolve, field
from trio.testing import MockClock

from actors.embedder import embedder
from actors.engines.embedding.limits import EmbedderLimits, EmbedderObserver
from actors.engines.simulated.embedder import BATCH_TOKENS_MAX, SimulatedEmbedder, vector
from actors.engines.simulated.spec import Faults
from actors.kit.calls import Address
from actors.kit.groups import first_leaf
from protocol.errors import (
    ActorError,
    ActorLost,
    BadRequest,
    DeadlineExceeded,
    EngineDied,
    EngineLost,
    EngineRefused,
    EngineStuck,
    RequestError,
)
from protocol.messages.embedding import Embed, Vectors
from protocol.messages.engine import EngineLoad
from protocol.trace import Trace
from supervisor.engines.work import EmbedInbox, embed_inbox
from tests.rig.embedders import EMBEDDER, VECTORS, running_embedder, simulated_embedder, text
from tests.rig.encoders import new_id
from tests.rig.tasks import expect_error

LIMITS = EmbedderLimits(computing_s=20.0, release_s=5.0)


@define(eq=False)
class Noting(EmbedderObserver):
    outcomes: list[tuple[str, float]] = field(factory=list)
    aborts: list[float] = field(factory=list)
    spans: list[tuple[str, float]] = field(factory=list)
    records: bool = False

    def request_ended(self, request: Embed, outcome: str, seconds: float) -> None:
        self.outcomes.append((outcome, seconds))

    def ended(self, request: Embed, outcome: str, began_at: float) -> bool:
        self.spans.append((outcome, began_at))
        return self.records

    def aborted(self, seconds: float) -> None:
        self.aborts.append(seconds)


@define(eq=False)
class Rig:
    engine: SimulatedEmbedder
    address: Address[Embed, Vectors, Vectors]
    inbox: EmbedInbox
    observer: Noting

    async def ask(self, number: int, *ids: int, owner: str = "", priority: int = 0) -> Vectors:
        request = Embed(new_id(number), (text(*ids or (number,)),), priority=priority, owner=owner)
        async with self.address.ask(request, 0) as answer:
            vectors = await answer.result()
        assert vectors is not None
        return vectors


@asynccontextmanager
async def rig(
    slots: int = 4, engine: SimulatedEmbedder | None = None, limits: EmbedderLimits = LIMITS
) -> AsyncIterator[Rig]:
    engine, observer = engine or simulated_embedder(), Noting()
    address, inbox = embed_inbox(8)
    async with running_embedder(engine), trio.open_nursery() as nursery:
        await nursery.start(embedder, inbox, engine, slots, limits, observer)
        yield Rig(engine, address, inbox, observer)
        await trio.sleep(LIMITS.release_s)
        assert await engine.load() == EngineLoad(0, 0, 0)
        nursery.cancel_scope.cancel()


async def ends_by(error: type[ActorError], inbox: EmbedInbox, engine: SimulatedEmbedder) -> None:
    """Run the actor until it raises an error of this class."""
    with pytest.raises(ExceptionGroup) as caught:
        await embedder(inbox, engine, 2, LIMITS)
    assert isinstance(first_leaf(caught.value), error)


async def test_a_request_is_computed_and_reported(autojump_clock: MockClock) -> None:
    async with rig() as subject:
        vectors = await subject.ask(1, 5, 6)
        assert bytes(vectors.data.data) == vector(text(5, 6), VECTORS).tobytes()
        with pytest.raises(BadRequest, match="item 0 has token 100"):
            await subject.ask(2, 100)
    assert subject.observer.outcomes == [("ended", 1.0), ("invalid_request", 0.0)]
    assert subject.observer.aborts == []


@pytest.mark.parametrize("records", [True, False])
async def test_a_followed_request_has_a_line_unless_its_span_is_recorded(
    records: bool, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = Embed(new_id(1), (text(5),), trace=Trace("a" * 32, "b" * 16, "c" * 16))
    async with rig() as subject:
        subject.observer.records = records
        async with subject.address.ask(request, 0) as answer:
            await answer.result()
    assert subject.observer.spans == [("ended", 0.0)]
    assert caplog.messages.count("embedding ended") == (not records)


async def test_requests_beyond_the_slots_wait_in_the_inbox_where_owners_take_turns_by_their_tokens(
    autojump_clock: MockClock,
) -> None:
    order: list[int] = []
    async with rig(slots=1) as subject, trio.open_nursery() as nursery:

        async def ask(number: int, owner: str, tokens: int, priority: int = 0) -> None:
            await subject.ask(number, *[1] * tokens, owner=owner, priority=priority)
            order.append(number)

        nursery.start_soon(partial(ask, 0, "greedy", 8))
        await trio.sleep(0.5)
        for number in (1, 2):
            nursery.start_soon(partial(ask, number, "greedy", 8))
            await trio.sleep(0.01)
        for number in (3, 4, 5):
            nursery.start_soon(partial(ask, number, "modest", 2))
            await trio.sleep(0.01)
        nursery.start_soon(partial(ask, 6, "urgent", 2, 1))
        await trio.sleep(0.01)
        assert subject.inbox.waiting == (6, 0)
        assert await subject.engine.load() == EngineLoad(1, 0, 8)
    assert order[:2] == [0, 6]
    assert order.index(5) < order.index(2), "the owner with few tokens is not behind the other's long requests"


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.5, 2.5])
async def test_leaving_frees_the_slot_at_any_moment(at_s: float, autojump_clock: MockClock) -> None:
    async with rig(slots=1) as subject:

        async def ask_and_leave(number: int) -> None:
            with trio.move_on_after(at_s):
                await subject.ask(number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask_and_leave, number)
        await trio.sleep(1)
        assert subject.inbox.waiting == (0, 0)
        assert await subject.engine.load() == EngineLoad(0, 0, 0)
        began_at = trio.current_time()
        await subject.ask(9)
        assert trio.current_time() == began_at + 1


async def test_a_slot_is_free_only_when_the_engine_has_released_its_request(autojump_clock: MockClock) -> None:
    async with rig(slots=1) as subject:
        with trio.move_on_after(0.25):
            await subject.ask(1)
        await subject.ask(2)
        assert trio.current_time() == 2, "the second began when the batch of the first had ended"
    assert subject.observer.aborts == [0.75]
    assert [outcome for outcome, _ in subject.observer.outcomes] == ["left", "ended"]


async def test_what_is_left_is_computed_no_further(autojump_clock: MockClock) -> None:
    info = evolve(EMBEDDER, request_tokens_max=BATCH_TOKENS_MAX)
    items = (text(*[1] * BATCH_TOKENS_MAX),) * 9  # a batch each
    async with rig(slots=1, engine=simulated_embedder(info)) as subject:
        with trio.move_on_after(1.5):
            async with subject.address.ask(Embed(new_id(1), items), 0) as answer:
                await answer.result()
        await subject.ask(2)
        assert trio.current_time() == 3
    assert subject.observer.aborts == [0.5]


async def test_a_request_that_takes_too_long_fails_and_its_slot_is_free(autojump_clock: MockClock) -> None:
    async with rig(slots=1) as subject:
        subject.engine.stall(22)
        with pytest.raises(DeadlineExceeded, match="more than 20 s"):
            await subject.ask(1)
        assert trio.current_time() == 20
        await subject.ask(2)
    assert [outcome for outcome, _ in subject.observer.outcomes] == ["deadline_exceeded", "ended"]


async def test_a_refusal_of_the_engine_fails_its_request_alone(autojump_clock: MockClock) -> None:
    async with rig() as subject:
        subject.engine.inject(Faults(refuse=1.0))
        with pytest.raises(EngineRefused):
            await subject.ask(1)
        subject.engine.inject(Faults())
        await subject.ask(2)


async def test_an_id_that_is_in_use_is_refused(autojump_clock: MockClock) -> None:
    async with rig() as subject, trio.open_nursery() as nursery:
        nursery.start_soon(subject.ask, 1)
        await trio.sleep(0.5)
        with pytest.raises(BadRequest, match="computed already"):
            await subject.ask(1)


async def test_an_engine_that_keeps_a_request_is_stuck(autojump_clock: MockClock) -> None:
    engine = simulated_embedder()
    engine.inject(Faults(stuck=1.0))
    address, inbox = embed_inbox(8)
    async with running_embedder(engine), trio.open_nursery() as nursery:
        nursery.start_soon(ends_by, EngineStuck, inbox, engine)
        subject = Rig(engine, address, inbox, Noting())
        with trio.move_on_after(0.5):
            await subject.ask(1)
    assert trio.current_time() == 0.5 + LIMITS.release_s


async def test_a_crash_fails_what_runs_and_what_waits_is_answered_by_the_next_life(autojump_clock: MockClock) -> None:
    address, inbox = embed_inbox(8)
    outcomes: list[str] = []

    async def ask(number: int) -> None:
        try:
            await Rig(engine, address, inbox, Noting()).ask(number)
            outcomes.append("ended")
        except RequestError as error:
            outcomes.append(error.code)

    engine = simulated_embedder()
    async with trio.open_nursery() as asking:
        async with trio.open_nursery() as life:
            life.start_soon(expect_error, EngineDied, engine.run)
            life.start_soon(ends_by, EngineDied, inbox, engine)
            for number in range(3):
                asking.start_soon(ask, number)
                await trio.sleep(0.1)
            engine.crash()
        assert outcomes == [EngineLost.code] * 2
        assert inbox.waiting == (1, 0)
        engine = simulated_embedder()
        async with running_embedder(engine), trio.open_nursery() as life:
            await life.start(embedder, inbox, engine, 2, LIMITS)
            await trio.sleep(2)
            assert outcomes == [EngineLost.code] * 2 + ["ended"]
            life.cancel_scope.cancel()


async def test_the_end_of_the_actor_aborts_what_runs(autojump_clock: MockClock) -> None:
    engine = simulated_embedder()
    address, inbox = embed_inbox(8)
    async with running_embedder(engine), trio.open_nursery() as asking:

        async def ask() -> None:
            with pytest.raises(ActorLost):
                await Rig(engine, address, inbox, Noting()).ask(1)

        async with trio.open_nursery() as nursery:
            await nursery.start(embedder, inbox, engine, 2, LIMITS)
            asking.start_soon(ask)
            await trio.sleep(0.5)
            nursery.cancel_scope.cancel()
        await trio.sleep(1)
        assert await engine.load() == EngineLoad(0, 0, 0)


async def test_many_askers_that_leave_at_any_moment_leave_nothing_behind_and_get_no_other_vector(
    autojump_clock: MockClock,
) -> None:
    info = evolve(EMBEDDER, vocabulary_size=100_000, running_max=8)
    async with rig(slots=8, engine=simulated_embedder(info, waiting_max=0)) as subject:

        async def ask(number: int) -> None:
            for turn in range(4):
                name = 4 * number + turn
                with trio.move_on_after((name * 7 % 40) / 2 if name % 3 == 0 else 1000), suppress(RequestError):
                    vectors = await subject.ask(name)
                    assert bytes(vectors.data.data) == vector(text(name), VECTORS).tobytes()

        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(ask, number)
        await trio.sleep(2)
        assert await subject.engine.load() == EngineLoad(0, 0, 0)
        assert subject.inbox.waiting == (0, 0)
    outcomes = [outcome for outcome, _ in subject.observer.outcomes]
    assert outcomes.count("ended") + outcomes.count("left") == len(outcomes)
    assert min(outcomes.count("ended"), outcomes.count("left")) >= 1
