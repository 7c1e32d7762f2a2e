"""Simulated prefills and decodes keep the contract of pairs, concurrent and sequential."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.hand_off import HAND_OFF, State
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.rendezvous_rooms import RendezvousRooms
from actors.engines.simulated.spec import Costs
from protocol.errors import HandOffFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from tests.contracts import pair as contract
from tests.rig.simulated_engines import generate, running, spec
from tests.system.simulator import simulate

COSTS = Costs(fixed_s=0.01, per_prefill_token_s=0.0001, per_running_s=0.001, release_s=0.002, transfer_s=0.02)
BOTH_WAYS = pytest.mark.parametrize("hand_off", [HandOff.CONCURRENT, HandOff.SEQUENTIAL])


@asynccontextmanager
async def pair(hand_off: HandOff, **changes: Any) -> AsyncIterator[contract.Pair]:
    rooms, states = RendezvousRooms(), HeldStates("here")
    leg = partial(spec, costs=COSTS, hand_off=hand_off, **changes)
    async with (
        running(leg(leg=Leg.PREFILL), meetings=rooms, states=states) as prefill,
        running(leg(leg=Leg.DECODE), meetings=rooms, states=states) as decode,
        running(leg(leg=Leg.BOTH)) as whole,
    ):
        yield contract.Pair(prefill, decode, whole, HAND_OFF)
        assert not len(states)


@BOTH_WAYS
@pytest.mark.parametrize("changes", [{}, {"slots": 2, "prefill_chunk": 8}, {"prefix_cache": False}])
async def test_a_pair_keeps_the_contract(hand_off: HandOff, changes: dict[str, Any], autojump_clock: MockClock) -> None:
    await contract.check_pair(partial(pair, hand_off, **changes))


@BOTH_WAYS
def test_the_contract_holds_in_any_order_of_tasks(hand_off: HandOff) -> None:
    async def scenario(rng: random.Random) -> None:
        await contract.check_pair(partial(pair, hand_off, page_size=rng.choice((1, 4, 16))))

    simulate(scenario, 0)


# A state that is not for this decode --------------------------------------------------------

WANTED = generate("a")
LAYOUT = spec().layout


def other_state(**changes: Any) -> State:
    return evolve(State.of(WANTED, LAYOUT, life=1, number=1, process="here"), **changes)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (other_state(layout=spec(page_size=8).layout), "of another engine"),
        (other_state(prompt=bytes(8)), "of another prompt"),
        (other_state(life=7), "of another life"),
        (other_state(), "held no longer"),
    ],
)
def test_a_state_of_another_engine_prompt_or_life_is_refused_by_name(state: State, why: str) -> None:
    states = HeldStates("here")
    states.begin_life()
    with pytest.raises(HandOffFailed, match=why):
        states.claim(evolve(WANTED, hand_off=state.encode()), LAYOUT)


def test_the_states_of_a_life_end_with_it_and_those_of_others_stay() -> None:
    states = HeldStates("here")
    first, second = (states.hold(states.begin_life(), WANTED, LAYOUT) for _ in range(2))
    states.end_life(first.life)
    assert len(states) == 1
    assert not states.holds(first)
    assert states.claim(evolve(WANTED, hand_off=second.encode()), LAYOUT) == second
    with pytest.raises(HandOffFailed, match="of another life"):
        states.claim(evolve(WANTED, hand_off=first.encode()), LAYOUT)


def test_a_state_of_another_process_is_taken_as_it_is() -> None:
    elsewhere = other_state(process="there")
    states = HeldStates("here")
    assert states.claim(evolve(WANTED, hand_off=elsewhere.encode()), LAYOUT) == elsewhere
    assert states.holds(elsewhere)
    assert not len(states)


async def test_a_crash_of_a_prefill_frees_its_states_and_fails_the_decode(autojump_clock: MockClock) -> None:
    states = HeldStates("here")
    leg = partial(spec, costs=COSTS, hand_off=HandOff.SEQUENTIAL)
    async with running(leg(leg=Leg.DECODE), states=states) as decode:
        with pytest.RaisesGroup(pytest.RaisesExc(Exception), flatten_subgroups=True):
            async with running(leg(leg=Leg.PREFILL), states=states) as prefill:
                state = await contract.state_of(prefill.submit(WANTED))
                answer = decode.submit(evolve(WANTED, hand_off=state))
                prefill.crash()
                assert not len(states)
                with pytest.raises(HandOffFailed, match="was left before"):
                    await answer.result()
