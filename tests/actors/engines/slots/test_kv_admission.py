"""Admission by KV memory: what a request may come to need, and that a full rank delays no request for another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from random import Random

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.simulated.hand_off import Rendezvous
from actors.engines.simulated.spec import ADDRESS, Costs, SimulatedSpec
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.kv_admission import BEHIND, KvAdmission, kv_tokens_needed
from actors.engines.slots.slots import Slots
from actors.prefill import prefill
from protocol.cost import ANSWER_TOKENS_MAX
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Sampling
from protocol.token_ids import TokenIds
from supervisor.engines.work import request_inbox
from tests.rig.calls import AnyAddress

NUMBERS = count(1)


def wanted(prompt: int, tokens_max: int, *, rank: int = 0, priority: int = 0, cached: int = 0) -> Generate:
    sampling = Sampling(tokens_max, temperature=0.0, ignore_eos=True)
    tokens = [next(NUMBERS) % 30_000 for _ in range(prompt)]
    return Generate(
        f"{next(NUMBERS):032x}", TokenIds.of(tokens), sampling, priority=priority, rank=rank, cached_tokens=cached
    )


@pytest.mark.parametrize(
    ("request_", "leg", "needed"),
    [
        (wanted(30, 10), Leg.BOTH, 48),
        (wanted(30, 2), Leg.BOTH, 32),
        (wanted(30, 10), Leg.DECODE, 48),
        (wanted(30, 10_000), Leg.PREFILL, 32),
        (wanted(32, 10, cached=16), Leg.BOTH, 32),
        (wanted(32, 16, cached=10**9), Leg.BOTH, 16),
        (wanted(32, 16, cached=-(10**9)), Leg.BOTH, 48),
        (wanted(16, 100_000), Leg.BOTH, 16 + ANSWER_TOKENS_MAX),
        (wanted(16, -(10**9)), Leg.BOTH, 16),
    ],
)
def test_a_request_needs_pages_for_what_is_not_cached_and_for_its_answer(
    request_: Generate, leg: Leg, needed: int
) -> None:
    assert kv_tokens_needed(request_, leg, 16) == needed


def test_a_request_that_never_fits_is_taken_when_there_is_no_other() -> None:
    memory = KvAdmission(64, page_size=16)
    assert memory.fits(wanted(1000, 1000))
    give_back = memory.take(wanted(1000, 1000), lambda: None)
    assert not memory.fits(wanted(1, 1))
    give_back()
    assert memory.fits(wanted(1000, 1000))


# Two ranks ----------------------------------------------------------------------------------


class System:
    """One engine with two ranks, the actor in front of it, and what each request waited for its first token."""

    def __init__(self, address: AnyAddress, engine: SimulatedEngine, ranks: tuple[Slots, ...]) -> None:
        self.address, self.engine, self.ranks = address, engine, ranks
        self.first_s: dict[str, float] = {}
        self.began_at: dict[str, float] = {}

    async def ask(self, request: Generate) -> None:
        began_at = trio.current_time()
        async with self.address.ask(request, request.sampling.tokens_max) as answer:
            await anext(answer)
            self.first_s[request.id] = trio.current_time() - began_at
            self.began_at[request.id] = trio.current_time()
            await answer.result()


@asynccontextmanager
async def system(
    *, leg: Leg = Leg.BOTH, is_limit: bool = True, pending_prefill_tokens_max: int = 0
) -> AsyncIterator[System]:
    """Run an actor whose ranks have memory for 512 tokens each."""
    costs = Costs(fixed_s=0.01, per_prefill_token_s=0.0)
    spec = SimulatedSpec(leg=leg, ranks=2, slots=8, kv_tokens_max=512, page_size=16, costs=costs)
    engine = SimulatedEngine(spec, Random(0))
    address, inbox = request_inbox(16, lambda request: request.rank)
    memory = partial(KvAdmission.of, engine.info, leg, is_limit=is_limit)
    serve = prefill if leg is Leg.PREFILL else partial(decode, pending_prefill_tokens_max=pending_prefill_tokens_max)
    ranks = tuple(Slots(engine, 8, Deadlines(), rank=rank, memory=memory()) for rank in range(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await nursery.start(serve, inbox, ranks)
        yield System(address, engine, ranks)
        nursery.cancel_scope.cancel()


async def test_requests_for_a_free_rank_are_never_delayed_by_a_full_one(autojump_clock: MockClock) -> None:
    async with system() as full, trio.open_nursery() as clients:
        for _ in range(12):
            clients.start_soon(full.ask, wanted(56, 200))
        await wait_all_tasks_blocked()
        assert full.ranks[0].memory.held.tokens == 512
        requests = [wanted(56, 4, rank=1) for _ in range(20)]
        for request in requests:
            await full.ask(request)
        assert max(full.first_s[request.id] for request in requests) < 0.05
        load = await full.engine.load()
        assert load.by_rank[0].running == 2
        assert load.waiting == 0
        clients.cancel_scope.cancel()


async def test_what_waits_for_memory_waits_outside_the_engine_and_is_taken_as_others_end(
    autojump_clock: MockClock,
) -> None:
    async with system() as one, trio.open_nursery() as clients:
        most = 0
        for _ in range(9):
            clients.start_soon(one.ask, wanted(56, 200))
        await wait_all_tasks_blocked()
        while len(one.first_s) < 9:
            load = await one.engine.load()
            assert load.waiting == 0
            most = max(most, load.running)
            await trio.sleep(0.05)
        assert most == 2
    assert one.ranks[0].memory.held.tokens == 0


async def test_one_owners_requests_leave_memory_to_another_once_there_are_two(autojump_clock: MockClock) -> None:
    """A key whose requests filled the memory, and that asked for one more, made the others wait for an end of its own."""
    async with system() as one, trio.open_nursery() as clients:

        async def alice() -> float:
            request = evolve(wanted(8, 8), owner="alice")
            await one.ask(request)
            return one.first_s[request.id]

        assert await alice() < 0.05
        for number in range(20):
            clients.start_soon(one.ask, evolve(wanted(20, 50 + 10 * (number % 3)), owner="greedy", priority=9))
        await trio.sleep(0.1)
        assert one.ranks[0].memory.held.tokens <= 480
        for _ in range(10):
            assert await alice() < 0.05
            await trio.sleep(0.1)
    assert one.ranks[0].memory.held.tokens == 0


async def test_the_only_owner_has_all_memory_and_a_sole_request_may_need_more(autojump_clock: MockClock) -> None:
    async with system() as one, trio.open_nursery() as clients:
        for _ in range(4):
            clients.start_soon(one.ask, evolve(wanted(56, 200), owner="greedy"))
        await wait_all_tasks_blocked()
        assert one.ranks[0].memory.held.tokens == 512
    async with system() as one, trio.open_nursery() as clients:
        for name in ("alice", "greedy"):
            clients.start_soon(one.ask, evolve(wanted(56, 450), owner=name))
        await trio.sleep(20)
        assert len(one.first_s) == 2


async def test_where_memory_is_no_limit_one_owners_requests_give_way_in_the_engine(autojump_clock: MockClock) -> None:
    """A request of five tokens took 46 s behind sixteen long answers of one key."""
    async with system(is_limit=False, pending_prefill_tokens_max=64) as one, trio.open_nursery() as clients:
        for number in range(6):
            clients.start_soon(one.ask, evolve(wanted(56 + number, 300), owner="greedy"))
        await trio.sleep(0.1)
        assert (await one.engine.load()).by_rank[0].waiting == 1, "one waits in the engine for memory"
        for _ in range(20):
            request = evolve(wanted(60, 60), owner="bob")
            await one.ask(request)
            assert one.first_s[request.id] < 0.1
    assert len(one.first_s) == 26, "all are answered"


async def test_prompts_that_wait_for_memory_in_the_engine_hold_up_none_of_another_owner(
    autojump_clock: MockClock,
) -> None:
    async with system(is_limit=False, pending_prefill_tokens_max=64) as one, trio.open_nursery() as clients:
        for _ in range(4):  # longer than the pending prompts may be: of these, one waits in the engine
            clients.start_soon(one.ask, evolve(wanted(100, 150), owner="greedy"))
        await trio.sleep(0.2)
        load = (await one.engine.load()).by_rank[0]
        assert (load.running, load.waiting) == (2, 1)
        request = evolve(wanted(100, 8), owner="bob")
        await one.ask(request)
        assert one.first_s[request.id] < 0.1


@pytest.mark.parametrize(("owned", "tokens", "behind"), [(0, 500, False), (16, 16, False), (16, 32, True)])
def test_an_owners_sole_request_goes_first_and_few_small_ones_do(owned: int, tokens: int, *, behind: bool) -> None:
    memory = KvAdmission(512, page_size=16, is_limit=False)
    if owned:
        memory.take(evolve(wanted(8, owned - 8), owner="bob"), lambda: None)
    memory.take(evolve(wanted(8, 400), owner="greedy"), lambda: None)
    request = evolve(wanted(8, tokens - 8), owner="bob", priority=7)
    assert memory.is_behind(request) is behind
    give_back = memory.take(request, lambda: None)
    assert memory.with_engine_priority(request).priority == (BEHIND if behind else 0)
    give_back()
    assert memory.is_behind(request) is behind


async def test_a_large_request_is_overtaken_by_a_more_urgent_one_and_by_none_of_its_own_rank_else(
    autojump_clock: MockClock,
) -> None:
    async with system() as one, trio.open_nursery() as clients:
        first, large, small, urgent = wanted(56, 200), wanted(56, 400), wanted(8, 8), wanted(8, 9, priority=1)
        for request in (first, large, small, urgent):
            clients.start_soon(one.ask, request)
            await trio.sleep(0.02)
    began = [one.began_at[request.id] for request in (first, urgent, large, small)]
    assert began == sorted(began)
    assert began[1] < began[2]


async def test_a_client_that_leaves_gives_its_memory_back_once_the_engine_has_released_it(
    autojump_clock: MockClock,
) -> None:
    async with system() as one:
        with trio.move_on_after(0.1):
            await one.ask(wanted(56, 400))
        await trio.sleep(1)
        assert [slots.memory.held.tokens for slots in one.ranks] == [0, 0]


async def test_the_prompts_of_a_prefill_are_bounded_by_themselves(autojump_clock: MockClock) -> None:
    async with system(leg=Leg.PREFILL) as one, trio.open_nursery() as clients:
        one.engine.stall(5.0)
        for room in range(0, 12, 2):
            limited = evolve(wanted(200, 100), hand_off=Rendezvous(room, 0, ADDRESS).encode())
            clients.start_soon(one.ask, limited)
        await trio.sleep(0.1)
        assert one.ranks[0].memory.held.tokens == 2 * 208
        assert (await one.engine.load()).waiting == 2
