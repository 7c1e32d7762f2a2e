"""A client disconnects at every single step of the scheduler, and nothing of its request is left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest
import trio
from attrs import evolve

from tests.rig.fake_engine import Costs
from tests.rig.gateway import post
from tests.rig.scheduler import sweep, taking_turns
from tests.rig.small_system import living
from tests.system.simulator import counting, judge
from tests.system.simulator.clients import GONE, Reader, chat
from tests.system.simulator.lanes import create
from tests.system.simulator.model import VOCABULARY, PlannedRequest
from tests.system.simulator.probes import each_alone
from tests.system.simulator.system import System

VICTIM = PlannedRequest(turns=(("user", "the victim"),), tokens_max=2)
PLAIN = evolve(VICTIM, plain=True)


async def streaming(reader: Reader) -> None:
    await reader.send(post(chat(VICTIM)))
    await reader.read_answer(judge.Received())


async def with_two_choices(reader: Reader) -> None:
    await reader.send(post(chat(VICTIM) | {"n": 2, "stream": False}))
    await reader.read_answer(judge.Received())


async def with_the_scores_of_its_prompt(reader: Reader) -> None:
    text: dict[str, object] = {"model": "tiny", "prompt": PLAIN.text, "max_tokens": 2, "echo": True, "logprobs": 20}
    await reader.send(post(text | {"n": 2, "stream": True}, "/v1/completions"))
    await reader.read_answer(judge.Received())


async def in_a_lane(reader: Reader) -> None:
    await reader.upgrade()
    await reader.say(create(VICTIM, "victim", "a"))
    await reader.say(create(VICTIM, "victim", "a"))
    await reader.events()
    await reader.events()


async def leave_at(rng: Random, step: int, program: Callable[[Reader], Awaitable[None]]) -> bool:
    """Close the victim's socket just before the step; return whether that came before its program had ended."""
    costs = Costs(slots=1, step_s=0.05, prefill_s=0.001, release_s=0.03, vocabulary_size=VOCABULARY)
    async with living(System(costs=costs, inbox_size=1, requests_max=2)) as system:
        victim = Reader(system.connect())

        async def ask() -> None:
            with suppress(*GONE):
                await program(victim)
            victim.stream.socket.close()

        with counting(step, victim.stream.socket.close) as steps:
            async with trio.open_nursery() as clients:
                clients.start_soon(ask)
                clients.start_soon(each_alone, system, 1, 2)
        await trio.sleep(0.3)  # a Cancel's way to the engine and a release: far less than any deadline
        assert not any(system.holding(victim.prompt) for victim in (VICTIM, PLAIN)), "whoever leaves is aborted"
        await trio.sleep(10)
        await system.check_at_rest()
        assert len({life.path for life in system.child_events}) * 2 == len(system.child_events), "it restarts nobody"
    return steps.taken < step


def test_a_client_that_disconnects_at_any_step_leaves_nothing() -> None:
    sweep(lambda rng, step: leave_at(rng, step, streaming))


@pytest.mark.parametrize(
    ("program", "first", "every"), taking_turns([with_two_choices, with_the_scores_of_its_prompt, in_a_lane])
)
def test_a_client_of_several_answers_that_disconnects_at_any_step_leaves_nothing(
    program: Callable[[Reader], Awaitable[None]], first: int, every: int
) -> None:
    sweep(lambda rng, step: leave_at(rng, step, program), first=first, every=every)
