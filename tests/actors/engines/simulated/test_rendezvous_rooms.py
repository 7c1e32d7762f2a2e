"""A simulated prefill and decode together give the text and take the time of one engine that does both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import ADDRESS, Costs, Faults, SimulatedSpec
from protocol.errors import AskerLeft, HandOffFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import HAND_OFF_BYTES_MAX, FinishReason, Generate, Usage
from tests.rig.simulated_engines import finished, generate, read, running, spec, timed
from tests.rig.tasks import call_later
from tests.system.simulator import simulate

COSTS = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.125, per_kv_token_s=0.0078125)
MEETING = Rendezvous(1, 0, ADDRESS)


def met(request: Generate, meeting: Rendezvous | None = MEETING) -> Generate:
    return evolve(request, hand_off=b"" if meeting is None else meeting.encode())


def leg_of(leg: Leg, **changes: int | Costs | Faults) -> SimulatedSpec:
    return spec(**({"leg": leg, "costs": COSTS, "prefill_chunk": 8} | changes))


# Prefill ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"tokens_min": 3}, {"ignore_eos": True}])
async def test_a_prefill_gives_the_first_token_and_ends(sampling: Mapping[str, Any], autojump_clock: MockClock) -> None:
    request = generate("a", prompt=20, tokens_max=9, logprobs=1, **sampling)
    async with running(leg_of(Leg.BOTH)) as engine:
        whole, _, replies = await read(engine.submit(request))
    began = trio.current_time()
    async with running(leg_of(Leg.PREFILL)) as engine:
        ids, finished, first_replies = await read(engine.submit(met(request)))
        assert ids == whole[:1]
        assert first_replies == replies[:1]
        assert (finished.reason, finished.matched, finished.usage) == (FinishReason.LENGTH, None, Usage(20, 1))
        assert trio.current_time() - began == COSTS.step_s(8, 1, 0) + COSTS.step_s(8, 1, 8) + COSTS.step_s(4, 1, 16)
        assert await engine.load() == EngineLoad(0, 0, 0)


async def test_a_prefill_needs_no_memory_for_the_answer_and_caches_prompts(autojump_clock: MockClock) -> None:
    async with running(leg_of(Leg.PREFILL, kv_tokens_max=40, page_size=4)) as engine:
        answers = [engine.submit(met(generate(name, prompt=16, tokens_max=24))) for name in "ab"]
        await trio.sleep(0.5)
        assert (await engine.load()).running == 2
        for answer in answers:
            await answer.result()
        again = await finished(engine.submit(met(generate("a", prompt=16, tokens_max=24))))
        assert again.usage.cached_tokens == 12


def in_room(name: str, number: int) -> Generate:
    return met(generate(name, prompt=16, tokens_max=24), evolve(MEETING, room=number))


@asynccontextmanager
async def full_pair() -> AsyncIterator[tuple[SimulatedEngine, SimulatedEngine, trio.Nursery]]:
    """Run a prefill, and a decode with memory for one request, which it has."""
    meetings, memory = RendezvousRooms(), {"kv_tokens_max": 40, "page_size": 4}
    async with (
        running(leg_of(Leg.PREFILL), meetings=meetings) as prefill,
        running(leg_of(Leg.DECODE, **memory), meetings=meetings) as decode,
        trio.open_nursery() as nursery,
    ):
        decode.submit(in_room("long", 1))
        await trio.sleep(0.5)
        yield prefill, decode, nursery
        nursery.cancel_scope.cancel()


async def test_a_prefill_waits_until_its_decode_has_room(autojump_clock: MockClock) -> None:
    async with full_pair() as (prefill, decode, _):
        decode.submit(in_room("a", 2))
        assert await timed(prefill.submit(in_room("b", 3))) < [10.0], "its decode is elsewhere"
        assert await timed(prefill.submit(in_room("a", 2))) > [24.0], "after each step of the long answer"
        assert await prefill.load() == EngineLoad(0, 0, 0)


async def test_a_prefill_does_not_wait_for_a_decode_that_was_left(autojump_clock: MockClock) -> None:
    async with full_pair() as (prefill, decode, nursery):
        decode.submit(in_room("a", 2))
        nursery.start_soon(call_later, 12, decode.abort, "a")
        assert await timed(prefill.submit(in_room("a", 2))) == [12.5]


async def test_a_prompt_that_waits_for_its_decode_can_be_aborted_and_computes_nothing_meanwhile(
    autojump_clock: MockClock,
) -> None:
    async with full_pair() as (prefill, decode, _):
        decode.submit(in_room("a", 2))
        answer = prefill.submit(in_room("a", 2))
        await trio.sleep(12)
        assert await prefill.load() == EngineLoad(1, 0, 16)
        prefill.abort("a")
        with pytest.raises(AskerLeft):
            await answer.result()
        assert await prefill.load() == EngineLoad(0, 0, 0)


# Decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 40.0])
@pytest.mark.parametrize("prompt", [1, 8, 20])
async def test_a_decode_alone_takes_what_both_take_and_the_transfer(
    prompt: int, transfer_s: float, autojump_clock: MockClock
) -> None:
    request = generate("a", prompt=prompt, tokens_max=5)
    async with running(leg_of(Leg.BOTH)) as engine:
        both = await timed(engine.submit(request))
    began = trio.current_time()
    async with running(leg_of(Leg.DECODE, costs=evolve(COSTS, transfer_s=transfer_s))) as engine:
        times = await timed(engine.submit(met(request)))
    assert [at_s - began for at_s in times] == [at_s + transfer_s for at_s in both]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.floats(0, 9)), min_size=1, max_size=6),
    st.sampled_from([{}, {"temperature": 1.0, "seed": 5}, {"tokens_min": 4}]),
    st.integers(1, 3),
)
def test_the_text_is_that_of_one_engine_whatever_comes_together(
    asked: list[Any], sampling: dict[str, Any], slots: int
) -> None:
    async def every(leg: Leg) -> list[Any]:
        answers: list[Any] = [None] * len(asked)

        async def ask_one(engine: SimulatedEngine, number: int, prompt: int, tokens_max: int, delay_s: float) -> None:
            await trio.sleep(delay_s)
            wanted = generate(f"r{number}", prompt, max(tokens_max, 4), logprobs=1, **sampling)
            ids, ended, replies = await read(engine.submit(wanted if leg is Leg.BOTH else met(wanted)))
            answers[number] = ids, evolve(ended, usage=evolve(ended.usage, cached_tokens=0)), replies

        engine_spec = leg_of(leg, slots=slots, eos_id=99, length_min=2, length_max=12)
        async with running(engine_spec) as engine:
            async with trio.open_nursery() as clients:
                for number, arguments in enumerate(asked):
                    clients.start_soon(ask_one, engine, number, *arguments)
            assert await engine.load() == EngineLoad(0, 0, 0)
        return answers

    assert simulate(lambda _: every(Leg.BOTH), 0) == simulate(lambda _: every(Leg.DECODE), 0)


@pytest.mark.parametrize("after_s", [0, 1, 3.125, 3.5, 4, 5])
async def test_a_decode_can_be_aborted_at_any_time(after_s: float, autojump_clock: MockClock) -> None:
    async with running(leg_of(Leg.DECODE, costs=evolve(COSTS, release_s=0.25))) as engine:
        answer = engine.submit(met(generate("a", prompt=8, tokens_max=9)))
        await trio.sleep(after_s)
        engine.abort("a")
        with pytest.raises(AskerLeft):
            await answer.result()
        assert await engine.load() == EngineLoad(0, 0, 0)
        assert trio.current_time() <= after_s + 0.25


# The wrong leg ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leg", "hand_off", "why"),
    [
        (Leg.BOTH, MEETING.encode(), "wants a hand-off"),
        (Leg.PREFILL, b"", "wants a hand-off"),
        (Leg.DECODE, b"", "wants a hand-off"),
        (Leg.PREFILL, Rendezvous(1, 0, b"elsewhere").encode(), "another prefill"),
        (Leg.PREFILL, evolve(MEETING, rank=1).encode(), "another rank"),
        (Leg.DECODE, b"room", "of 4 bytes"),
        (Leg.DECODE, bytes(HAND_OFF_BYTES_MAX + 1), "at most"),
    ],
)
async def test_what_is_for_another_leg_is_refused_by_name(
    leg: Leg, hand_off: bytes, why: str, autojump_clock: MockClock
) -> None:
    async with running(leg_of(leg)) as engine:
        with pytest.raises(HandOffFailed, match=why):
            engine.submit(evolve(generate("a"), hand_off=hand_off))
        assert await engine.load() == EngineLoad(0, 0, 0)
