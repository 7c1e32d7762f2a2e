"""A router over simulated engines: at every step of the scheduler a request is left, or an engine crashes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from attrs import define, evolve, field

from actors.decode import decode
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.held_states import HeldStates
from actors.engines.simulated.spec import Costs
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import Slots
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy, KvSettings
from actors.routing.pools.service_levels import ServiceLevels
from actors.routing.route import FailoverLimits
from protocol.block_hashes import block_hashes
from protocol.errors import ActorLost, EngineDied
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineLoad, HandOff
from protocol.messages.generation import Generate, PromptBlocks, RoutingHints, Started
from protocol.messages.kv_events import BlockChange, BlockEvent
from tests.rig.calls import AnyPriorityInbox, priority_inbox
from tests.rig.prompt_scores import scores_of
from tests.rig.routed_pools import whole_levels
from tests.rig.router import ActorWorker, RouterRig, ask, generate, routed
from tests.rig.scheduler import sweep
from tests.rig.simulated_engines import spec
from tests.system.simulator import counting, simulate


@define(eq=False)
class Real(ActorWorker):
    """A decode actor over a simulated engine, as a worker."""

    engine: SimulatedEngine = field(kw_only=True)


@asynccontextmanager
async def over_engines(
    *legs: Leg, levels: ServiceLevels | None = None, hand_off: HandOff = HandOff.CONCURRENT
) -> AsyncIterator[RouterRig]:
    costs = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.0, release_s=0.125, transfer_s=0.5)
    limits, states = FailoverLimits(resume_s=60), HeldStates()
    async with routed(limits=limits, levels=levels) as rig, trio.open_nursery() as engines:

        async def act(inbox: AnyPriorityInbox, engine: SimulatedEngine, name: str) -> None:
            try:
                await decode(inbox, [Slots(engine, engine.info.running_max, Deadlines())])
            except* EngineDied:
                rig.pool.change(name, *rig.pool.gone)
            while True:  # nobody starts it again here, so whoever waits in the inbox is told
                (await inbox.receive()).answer.fail(ActorLost("the worker has ended"))

        async def compute(engine: SimulatedEngine) -> None:
            with suppress(EngineDied):
                await engine.run()

        for number, leg in enumerate(legs):
            engine = SimulatedEngine(
                spec(leg=leg, slots=1, costs=costs, hand_off=hand_off), random.Random(0), states=states
            )
            worker = Real(f"{leg}{number}", rig.pool, engine.info.running_max, leg, engine.info, engine=engine)
            worker.address, inbox = priority_inbox(1, lambda _: 0)
            rig.pool.all.append(worker)
            engines.start_soon(compute, engine)
            engines.start_soon(act, inbox, engine, worker.name)
        rig.pool.change()
        yield rig
        assert not len(states), "a prefill holds a state for no decode"
        engines.cancel_scope.cancel()


ROOMS = {
    "one worker": ((Leg.BOTH,), HandOff.NONE),
    "a pair": ((Leg.PREFILL, Leg.DECODE), HandOff.CONCURRENT),
    "a sequential pair": ((Leg.PREFILL, Leg.DECODE), HandOff.SEQUENTIAL),
}
PAGE = 2
POOLS = {"one pool": None, "two pools": whole_levels(both0=1, both1=0)}


def by_prefix(name: str) -> Generate:
    """Return a request that a policy may route by its blocks, in a session, and that is for the quickest pool."""
    wanted = generate(name, 4, temperature=0.0)
    blocks = PromptBlocks(PAGE, block_hashes(wanted.tokens, PAGE))
    return evolve(wanted, hints=RoutingHints("session", (blocks,), ttft_target_ms=0))


async def sweep_one(
    legs: tuple[Leg, ...], hand_off: HandOff, step: int, crash: int | None, expected: list[int]
) -> bool:
    """Leave, or crash one of the engines, just before the step; return whether the answer had ended by then."""
    async with over_engines(*legs, *legs, hand_off=hand_off) as rig:
        return await act_at(rig, step, crash, expected, lambda name: generate(name, 4, temperature=0.0))


async def sweep_scored(
    legs: tuple[Leg, ...], hand_off: HandOff, step: int, crash: int | None, expected: list[int]
) -> bool:
    """Do the same with the log probabilities of the prompt, which no asker gets twice or too late."""
    async with over_engines(*legs, *legs, hand_off=hand_off) as rig:
        return await act_at(rig, step, crash, expected, scored)


def scored(name: str) -> Generate:
    return evolve(generate(name, 4, temperature=0.0), logprobs=2, prompt_logprobs=True)


async def sweep_by_prefix(levels: ServiceLevels | None, step: int, crash: int | None, expected: list[int]) -> bool:
    """Do the same where the policy counts the prompts that have not begun, and nothing of them may be left."""
    policy = KvPolicy(KvSettings(), PrefixIndex(), random.Random(0).random, trio.current_time)
    async with over_engines(Leg.BOTH, Leg.BOTH, levels=levels) as rig:
        rig.routing.policy = policy
        policy.index.apply("both0", [BlockEvent(BlockChange.STORED, 0, block_hashes([5, 6, 7, 8], PAGE))])
        is_over = await act_at(rig, step, crash, expected, by_prefix)
    assert len(policy.expected) == 0
    return is_over


async def act_at(
    rig: RouterRig, step: int, crash: int | None, expected: list[int], request: Callable[[str], Generate]
) -> bool:
    """Leave, or crash one of the engines, just before the step; return whether the answer had ended by then."""
    victim = trio.CancelScope()

    def act() -> None:
        if crash is None:
            victim.cancel(reason="sweep")
        else:
            rig.pool.all[crash].engine.crash()

    async def ask_one(name: str, scope: trio.CancelScope) -> None:
        with scope:
            got = await ask(rig, request(name))
            assert (len(got.ids), got.ids) == (4, expected)
            begun = [reply.scores for reply in got.replies if isinstance(reply, Started)]
            assert begun == [scores_of(request(name), spec().vocabulary_size, spec().seed)]
            ended.append(name)

    ended: list[str] = []
    with counting(step, act) as steps:
        async with trio.open_nursery() as clients:
            clients.start_soon(ask_one, "a" * 32, victim)
            clients.start_soon(ask_one, "b" * 32, trio.CancelScope())
            clients.start_soon(ask_one, "c" * 32, trio.CancelScope())
    await trio.sleep(1)
    rig.check_at_rest()
    for worker in rig.pool.workers():
        assert await worker.engine.load() == EngineLoad(0, 0, 0)
    assert len(ended) == 3 - victim.cancelled_caught
    with trio.fail_after(60):
        assert (await ask(rig, request("after"))).ids == expected
    return steps.taken < step


@pytest.fixture(scope="module")
def expected() -> list[int]:
    async def scenario(_: random.Random) -> list[int]:
        async with over_engines(Leg.BOTH) as rig:
            return (await ask(rig, generate("a", 4, temperature=0.0))).ids

    ids = simulate(scenario, 0)
    assert isinstance(ids, list)
    return ids


CRASHES = pytest.mark.parametrize("crash", [None, 0, 1], ids=["leave", "crash the first", "crash the second"])


@CRASHES
@pytest.mark.parametrize(("legs", "hand_off"), ROOMS.values(), ids=ROOMS.keys())
def test_at_every_step(legs: tuple[Leg, ...], hand_off: HandOff, crash: int | None, expected: list[int]) -> None:
    sweep(lambda _, step: sweep_one(legs, hand_off, step, crash, expected), steps_min=40)


@pytest.mark.nightly
@CRASHES
@pytest.mark.parametrize(("legs", "hand_off"), ROOMS.values(), ids=ROOMS.keys())
def test_at_every_step_of_a_request_for_the_scores_of_its_prompt(
    legs: tuple[Leg, ...], hand_off: HandOff, crash: int | None, expected: list[int]
) -> None:
    sweep(lambda _, step: sweep_scored(legs, hand_off, step, crash, expected), steps_min=40)


@CRASHES
@pytest.mark.parametrize("levels", POOLS.values(), ids=POOLS.keys())
def test_at_every_step_of_a_request_by_prefix(
    levels: ServiceLevels | None, crash: int | None, expected: list[int]
) -> None:
    sweep(lambda _, step: sweep_by_prefix(levels, step, crash, expected), steps_min=40)
