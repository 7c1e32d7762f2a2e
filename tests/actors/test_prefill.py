"""Prefill: a prompt keeps its slot until the decode of its request has the KV cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve, frozen
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import ADDRESS, Costs
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import SlotObserver, Slots
from actors.prefill import prefill
from protocol.errors import DeadlineExceeded, EngineDied, EngineLost
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad, HandOff
from protocol.messages.generation import FinishReason, Generate, Started, Usage
from tests.rig.calls import AnyAddress, priority_inbox
from tests.rig.simulated_engines import generate, running, spec
from tests.rig.tasks import expect_error

COSTS = Costs(fixed_s=1.0, per_prefill_token_s=0.0, per_running_s=0.0)


@frozen
class Pair:
    """A prefill and a decode, each the actor of a simulated engine of its own; one step takes a second."""

    prefill: AnyAddress
    decode: AnyAddress
    prefill_engine: SimulatedEngine


@asynccontextmanager
async def pair(*, slots: int = 2, decode_memory: int = 4096) -> AsyncIterator[Pair]:
    meetings, of_pair = RendezvousRooms(), {"costs": COSTS, "prefill_chunk": 64, "slots": 4}
    async with (
        running(spec(leg=Leg.PREFILL, **of_pair), meetings=meetings) as first,
        running(spec(leg=Leg.DECODE, kv_tokens_max=decode_memory, **of_pair), meetings=meetings) as second,
        trio.open_nursery() as actors,
    ):
        to_prefill, prompts = priority_inbox(8, lambda request: request.priority)
        to_decode, requests = priority_inbox(8, lambda request: request.priority)
        await actors.start(prefill, prompts, [Slots(first, slots, Deadlines())])
        await actors.start(decode, requests, [Slots(second, 4, Deadlines())])
        yield Pair(to_prefill, to_decode, first)
        actors.cancel_scope.cancel()


def met(name: str, room: int, *, prompt: int = 16, tokens_max: int = 8, priority: int = 0) -> Generate:
    """A request whose legs meet in a room."""
    request = generate(name, prompt, tokens_max)
    return evolve(request, hand_off=Rendezvous(room, 0, ADDRESS).encode(), priority=priority)


async def ask(address: AnyAddress, request: Generate) -> tuple[list[Any], Any]:
    async with address.ask(request, request.sampling.tokens_max) as answer:
        return [reply async for reply in answer], await answer.result()


async def test_the_answer_is_the_one_token_that_its_decode_streams_first(autojump_clock: MockClock) -> None:
    answers = {}

    async def ask_leg(leg: str, address: AnyAddress) -> None:
        answers[leg] = await ask(address, met("a", 1))

    async with pair() as workers, trio.open_nursery() as legs:
        legs.start_soon(ask_leg, "prefill", workers.prefill)
        legs.start_soon(ask_leg, "decode", workers.decode)
    [started, first], finished = answers["prefill"]
    assert isinstance(started, Started)
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(16, 1))
    replies, _ = answers["decode"]
    assert replies[1].ids[0] == first.ids[0]


async def test_a_prompt_keeps_its_slot_until_its_decode_has_room_for_the_cache(autojump_clock: MockClock) -> None:
    async with pair(slots=1, decode_memory=40) as workers, trio.open_nursery() as legs:
        legs.start_soon(ask, workers.decode, met("long", 1, tokens_max=24))
        await trio.sleep(0.5)
        legs.start_soon(ask, workers.decode, met("a", 2, tokens_max=24))
        legs.start_soon(ask, workers.prefill, met("a", 2, tokens_max=24))
        await trio.sleep(5)
        legs.start_soon(ask, workers.prefill, met("b", 3))
        await trio.sleep(5)
        assert workers.prefill.inbox.waiting == (1, 0), "the prompt of a is computed, and its slot is not free"  # type: ignore[attr-defined]
        assert await workers.prefill_engine.load() == EngineLoad(1, 0, 16)
        await trio.sleep(30)
        assert workers.prefill.inbox.waiting == (0, 0)  # type: ignore[attr-defined]


async def test_leaving_aborts_the_prompt_and_frees_the_slot(autojump_clock: MockClock) -> None:
    async with pair(slots=1, decode_memory=40) as workers, trio.open_nursery() as legs:
        legs.start_soon(ask, workers.decode, met("long", 1, tokens_max=24))
        await trio.sleep(0.5)
        legs.start_soon(ask, workers.decode, met("a", 2, tokens_max=24))
        with trio.move_on_after(5):
            await ask(workers.prefill, met("a", 2, tokens_max=24))
        await wait_all_tasks_blocked()
        assert await workers.prefill_engine.load() == EngineLoad(0, 0, 0)
        with trio.fail_after(2):
            await ask(workers.prefill, met("b", 3))
        legs.cancel_scope.cancel()


async def test_a_lost_engine_fails_its_prompts_and_ends_the_actor(autojump_clock: MockClock) -> None:
    ends = [pytest.RaisesExc(EngineDied, match=why) for why in ("crashed", "is lost")]
    with pytest.RaisesGroup(*ends, flatten_subgroups=True):
        async with pair() as workers, trio.open_nursery() as legs:
            legs.start_soon(expect_error, EngineLost, ask, workers.prefill, met("a", 1, prompt=200))
            await trio.sleep(0.5)
            workers.prefill_engine.crash()
            await trio.sleep(1)


# Sequential -------------------------------------------------------------------------------


class Aborts(SlotObserver):
    """The aborts of requests."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def aborted(self, seconds: float) -> None:
        self.seconds.append(seconds)


@asynccontextmanager
async def sequential(deadlines: Deadlines, observer: SlotObserver) -> AsyncIterator[tuple[AnyAddress, SimulatedEngine]]:
    """Run a prefill with one slot whose engine returns states."""
    of_engine = spec(leg=Leg.PREFILL, hand_off=HandOff.SEQUENTIAL, costs=COSTS)
    async with running(of_engine) as engine, trio.open_nursery() as actors:
        address, prompts = priority_inbox(8, lambda _: 0)
        await actors.start(prefill, prompts, [Slots(engine, 1, deadlines, observer)])
        yield address, engine
        actors.cancel_scope.cancel()


async def test_a_state_keeps_its_slot_until_its_asker_leaves_which_is_no_abort(autojump_clock: MockClock) -> None:
    observer = Aborts()
    async with sequential(Deadlines(gap_s=5), observer) as (address, engine):
        async with address.ask(generate("a"), 8) as answer:
            started = await anext(answer)
            assert isinstance(started, Started)
            assert started.hand_off
            await trio.sleep(60)  # far longer than between two tokens
            assert not answer.over.is_set()
            assert (await engine.load()).running == 1
        await wait_all_tasks_blocked()
        assert await engine.load() == EngineLoad(0, 0, 0)
        assert observer.seconds == []
        with trio.move_on_after(0.5):
            await ask(address, generate("b"))
        await wait_all_tasks_blocked()
        assert observer.seconds == [0], "it was left before its state"


async def test_a_state_that_nobody_takes_is_freed_when_the_whole_time_of_a_request_is_over(
    autojump_clock: MockClock,
) -> None:
    async with sequential(Deadlines(total_s=30), SlotObserver()) as (address, engine):
        with pytest.raises(DeadlineExceeded, match="30 s in all"):
            await ask(address, generate("a"))
        assert trio.current_time() == 30
        assert await engine.load() == EngineLoad(0, 0, 0)
