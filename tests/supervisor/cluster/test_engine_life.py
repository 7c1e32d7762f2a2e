"""Operations that take an engine out of service, on the assembled engines of a node: requests, states, and crashes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.slots.deadlines import RELEASE_S
from protocol.errors import BadRequest, EngineLost, NotReady, Overloaded, RequestError
from protocol.messages.engine import EngineLoad
from protocol.messages.generation import Finished, Generate, Sampling, Tokens
from protocol.messages.kind import Message
from protocol.messages.leaving import ALL_TAGS, MemoryTag, RunningRequests
from protocol.messages.memory import MemoryState, ReleaseMemory, ResumeMemory
from protocol.messages.operations import FlushCache
from protocol.token_ids import TokenIds
from supervisor.cluster import operations
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from tests.rig.assembly import built_assembly
from tests.rig.cluster_files import MODEL

FILE = f"""
[node.main]
[gateway]
port = 0
{MODEL}[engine.one]
model = "tiny"
kind = "simulated"
kv_tokens_max = 4096
slots = 8
deadlines.gap_s = 2.0
deadlines.first_token_s = 2.0
deadlines.total_s = 30.0
canary.after_s = 3.0
"""
TOKENS = 200
NAME = "main/one"
HOLD = ReleaseMemory(running=RunningRequests.HOLD)

_numbers = count(1)


class Engines:
    """The engine of a node that runs, and what is asked of it."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.worker = assembly.directory.local["one"]
        self.registration = assembly.engines["one"]

    @property
    def live(self) -> SimulatedEngine:
        live = self.registration.live
        assert isinstance(live, SimulatedEngine)
        return live

    async def operate(self, request: Message) -> Message:
        """Have the engine carry out an operation; raises its error."""
        outcome = (await operations.operate(self.assembly.directory, request))[NAME]
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def stream(self, tokens: int = TOKENS, place: int = 0) -> list[int]:
        """Return the whole answer to a prompt, which its place decides."""
        prompt = [place + 1, *range(40, 60)]
        request = Generate(
            f"{next(_numbers):032x}", TokenIds.of(prompt), Sampling(tokens, temperature=0.0, ignore_eos=True)
        )
        async with self.worker.ask(request, tokens) as answer:
            ids = [token async for reply in answer if isinstance(reply, Tokens) for token in reply.ids]
            assert isinstance(await answer.result(), Finished)
        return ids

    async def kv_tokens_max(self) -> int:
        """Return the KV memory of the engine as it is reported."""
        loads = list[EngineLoad]()
        with trio.move_on_after(1):
            await self.live.watch_load(loads.append)
        return loads[0].by_rank[0].kv_tokens_max

    async def serves(self) -> None:
        """Check that the engine is in service with all of its memory, and holds nothing."""
        with trio.fail_after(60):
            await self.registration.wait()
            assert len(await self.stream(8)) == 8
        assert self.registration.in_service
        assert await self.live.load() == EngineLoad(0, 0, 0)
        assert await self.kv_tokens_max() == 4096


@pytest.fixture
async def engines(written: Callable[[str], Path], autojump_clock: MockClock) -> AsyncIterator[Engines]:
    async with running(built_assembly(read_cluster(written(FILE)), "main")[0]) as assembly:
        yield Engines(assembly)


@asynccontextmanager
async def running(assembly: Assembly) -> AsyncIterator[Assembly]:
    """Run the engine of a node."""
    members = [child for child in assembly.tree.children if child.name == "one"]
    tree = evolve(assembly.tree, children=tuple(evolve(child, needs=()) for child in members))
    async with trio.open_nursery() as nursery:
        run = partial(supervise, tree, on_event=assembly.on_event, rng=random.Random(0))
        await nursery.start(lambda task_status: run(task_status=task_status))
        yield assembly
        nursery.cancel_scope.cancel()


# Running requests ---------------------------------------------------------------------


async def test_held_requests_go_on_after_far_longer_than_any_deadline(
    engines: Engines, autojump_clock: MockClock
) -> None:
    undisturbed, life = await engines.stream(), engines.live
    answers = list[list[int]]()

    async def ask() -> None:
        answers.append(await engines.stream())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.sleep(0.2)
        state = await engines.operate(HOLD)
        service = "out of service: memory released: kv_cache, weights, cuda_graph, requests held"
        assert state == MemoryState(ALL_TAGS, service)
        assert engines.registration.status_text == f"is {service}"
        assert await engines.kv_tokens_max() == 0
        await trio.sleep(1000)
        await engines.operate(ResumeMemory(tags=(MemoryTag.WEIGHTS,)))
        await trio.sleep(1000)
        assert not answers
        assert engines.registration.current is None, "it is chosen again when the last tag is back"
        assert await engines.operate(ResumeMemory()) == MemoryState((), "in service")
    assert answers == [undisturbed] * 3
    assert engines.live is life, "no deadline, canary or stuck slot has ended it"
    await engines.serves()


async def test_the_deadlines_go_on_from_where_they_were(engines: Engines, autojump_clock: MockClock) -> None:
    """A stalled engine lets a request wait for its next token: 1 s before the rest, and 1 s of 2 s behind it."""
    life = engines.live

    async def ask() -> None:
        with pytest.raises(EngineLost):  # the stalled engine keeps its slot
            await engines.stream()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.2)
        life.stall(1000)
        await trio.sleep(1)
        await engines.operate(HOLD)
        await trio.sleep(10)
        await engines.operate(ResumeMemory())
        began_at = trio.current_time()
    assert trio.current_time() - began_at == pytest.approx(1 + RELEASE_S, abs=0.3)


async def test_running_requests_are_waited_for_or_the_operation_is_refused(
    engines: Engines, autojump_clock: MockClock
) -> None:
    answers = list[list[int]]()

    async def ask() -> None:
        answers.append(await engines.stream(1000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.2)
        with pytest.raises(Overloaded, match=r"1 requests had not ended after 0.1 s, so nothing was done"):
            await engines.operate(ReleaseMemory(within_s=0.1))
        assert engines.registration.current is engines.live
        await engines.operate(ReleaseMemory())
        assert len(answers) == 1
    await engines.operate(ResumeMemory())
    await engines.serves()


async def test_running_requests_that_are_ended_may_go_elsewhere(engines: Engines, autojump_clock: MockClock) -> None:
    async def ask() -> None:
        with pytest.raises(NotReady, match="is out of service: release-memory runs"):
            await engines.stream(1000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.2)
        await engines.operate(ReleaseMemory(running=RunningRequests.END))
    await engines.operate(ResumeMemory())
    await engines.serves()


async def test_requests_that_come_meanwhile_wait_for_the_last_tag(engines: Engines, autojump_clock: MockClock) -> None:
    await engines.operate(ReleaseMemory())
    answers = list[list[int]]()

    async def ask() -> None:
        answers.append(await engines.stream(8))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(100)
        with pytest.raises(BadRequest, match="flush-cache needs memory that is released: kv_cache"):
            await engines.operate(FlushCache())
        await engines.operate(ResumeMemory())
    assert len(answers) == 1


async def test_a_second_operation_is_refused_while_one_runs(engines: Engines, autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engines.operate, ReleaseMemory())
        await trio.sleep(0.01)
        for request in (ReleaseMemory(), ResumeMemory()):
            with pytest.raises(Overloaded, match="it is out of service: release-memory runs"):
                await engines.operate(request)
    with pytest.raises(BadRequest, match="released already"):
        await engines.operate(ReleaseMemory())
    await engines.operate(ResumeMemory())
    with pytest.raises(BadRequest, match="no memory is released"):
        await engines.operate(ResumeMemory())
    await engines.serves()


# Crashes and askers that leave -----------------------------------------------------------


MOMENTS = [0.0, 0.01, 0.04, 0.06, 0.09, 0.11, 0.3, 0.49, 0.51, 0.54, 0.56, 0.8]
"""Before, in and after each step of a release that begins at 0 s, and of a return that begins at 0.5 s."""


async def release_and_resume(engines: Engines, running: RunningRequests) -> None:
    """Release and return the memory; whatever becomes of it."""
    with trio.move_on_after(5), suppress(RequestError):
        await engines.operate(ReleaseMemory(running=running))
        await trio.sleep(0.4)
        await engines.operate(ResumeMemory())


@pytest.mark.parametrize("running", RunningRequests)
@pytest.mark.parametrize("at_s", MOMENTS)
async def test_a_crash_at_any_step_ends_in_a_life_with_all_of_its_memory(
    at_s: float, running: RunningRequests, engines: Engines, autojump_clock: MockClock
) -> None:
    first, tokens = engines.live, 10 if running is RunningRequests.DRAIN else TOKENS
    whole = await engines.stream(tokens)

    async def ask() -> None:
        with suppress(NotReady, EngineLost):
            assert await engines.stream(tokens) == whole

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        await trio.sleep(0.2)
        nursery.start_soon(release_and_resume, engines, running)
        await trio.sleep(at_s)
        first.crash()
    await engines.registration.wait()
    assert engines.live is not first
    await engines.serves()


@pytest.mark.parametrize("running", RunningRequests)
@pytest.mark.parametrize("at_s", MOMENTS)
async def test_clients_that_leave_at_any_step_leave_nothing(
    at_s: float, running: RunningRequests, engines: Engines, autojump_clock: MockClock
) -> None:
    life = engines.live

    async def ask(place: int) -> None:
        with suppress(NotReady):  # it was ended
            await engines.stream(4000 - 40, place)

    async with trio.open_nursery() as clients, trio.open_nursery() as nursery:
        for place in range(3):
            clients.start_soon(ask, place)
        await trio.sleep(0.2)
        nursery.start_soon(release_and_resume, engines, running)
        await trio.sleep(at_s)
        clients.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.sleep(6)
            assert await life.load() == EngineLoad(0, 0, 0)
    if not engines.registration.in_service:
        await engines.operate(ResumeMemory())
    assert engines.live is life
    await engines.serves()


@pytest.mark.parametrize("at_s", MOMENTS[1:])
async def test_an_asker_that_leaves_stops_no_operation(
    at_s: float, engines: Engines, autojump_clock: MockClock
) -> None:
    life = engines.live
    with trio.move_on_after(at_s):
        await engines.operate(ReleaseMemory())
    await trio.sleep(1)
    assert engines.registration.status_text == "is out of service: memory released: kv_cache, weights, cuda_graph"
    with trio.move_on_after(at_s):
        await engines.operate(ResumeMemory())
    await trio.sleep(1)
    assert engines.live is life
    await engines.serves()


@pytest.mark.parametrize("running", [RunningRequests.DRAIN, RunningRequests.HOLD])
async def test_fifty_rounds_under_load_change_no_answer(
    running: RunningRequests, engines: Engines, autojump_clock: MockClock
) -> None:
    whole = [await engines.stream(place=place) for place in range(4)]
    life, chance, rounds, ended = engines.live, random.Random(1), 0, list[bool]()

    async def ask(place: int) -> None:
        while rounds < 50:
            ended.append(await engines.stream(place=place) == whole[place])

    async with trio.open_nursery() as nursery:
        for place in range(4):
            nursery.start_soon(ask, place)
        for rounds in range(1, 51):  # noqa: B007  # the askers read it
            await trio.sleep(chance.random())
            tags = tuple(chance.sample(ALL_TAGS, chance.randint(1, 3)))
            await engines.operate(ReleaseMemory(tags=tags, running=running))
            await trio.sleep(chance.random())
            await engines.operate(ResumeMemory())
    assert len(ended) >= 50
    assert all(ended)
    assert engines.live is life
    await engines.serves()
