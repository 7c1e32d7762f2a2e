"""An owner with many generations leaves slots to others, who never wait for them; with one owner all slots are used."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from attrs import define, evolve
from trio.testing import MockClock

from actors.routing.load import Load
from actors.routing.ports import Worker
from actors.routing.slot_shares import SlotShares
from protocol.errors import EngineLost, Preempted
from protocol.messages.generation import Generate
from tests.rig.routed_pools import aimed, asked, pair_levels, pair_workers, whole_levels
from tests.rig.router import Fake, Play, RouterRig, ask, generate, pair, routed


def of(owner: str, number: int = 0, tokens_max: int = 6, **changes: Any) -> Generate:
    return evolve(generate(f"{owner}{number}", tokens_max), owner=owner, **changes)


async def ask_many(nursery: trio.Nursery, rig: RouterRig, owner: str, count: int, **changes: Any) -> None:
    for number in range(count):
        nursery.start_soon(ask, rig, of(owner, number, **changes))
        await trio.sleep(0.01)


async def test_one_owners_generations_leave_a_slot_for_the_first_of_another(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=4), kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 8, tokens_max=30)
        assert asked(rig)["w"] == ["greedy0", "greedy1", "greedy2"]
        began_at = trio.current_time()
        await ask(rig, of("bob"))
        assert trio.current_time() == pytest.approx(began_at + 6)
        await ask(rig, of("bob", 1))
        assert trio.current_time() == pytest.approx(began_at + 12), "its own time each"


async def test_one_owners_generations_have_all_slots_where_none_is_kept(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=4)) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "alice", 8)
        assert len(asked(rig)["w"]) == 4


async def test_a_waiting_generation_begins_when_another_of_its_owner_ends(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", slots=2), Fake("b", slots=2), kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 7)
        assert sum(map(len, asked(rig).values())) == 3
        await trio.sleep(6.1)
        assert sum(map(len, asked(rig).values())) == 6
        await trio.sleep(6.1)
        assert sum(map(len, asked(rig).values())) == 7


async def test_an_urgent_generation_of_an_owner_with_its_part_is_passed_by_others(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=4), kept_slots=2) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 4, priority=50, tokens_max=30)
        await ask_many(nursery, rig, "bob", 2, tokens_max=30)
        assert asked(rig)["w"] == ["greedy0", "greedy1", "bob0", "bob1"]


async def test_where_there_is_one_slot_each_owner_may_have_it(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=1), kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 3)
        await ask_many(nursery, rig, "bob", 1)
        await trio.sleep(100)
        assert asked(rig)["w"] == ["greedy0", "greedy1", "bob0", "greedy2"], "each has its turn"


async def test_the_slots_of_a_pool_are_shared_among_its_own_requests(autojump_clock: MockClock) -> None:
    workers = Fake("quick", slots=4), Fake("cheap", slots=4)
    async with (
        routed(*workers, levels=whole_levels(quick=1, cheap=0), kept_slots=1) as rig,
        trio.open_nursery() as nursery,
    ):
        for name in range(6):
            nursery.start_soon(ask, rig, evolve(aimed(f"q{name}", 0), owner="greedy"))
            nursery.start_soon(ask, rig, evolve(aimed(f"c{name}", None), owner="greedy"))
            await trio.sleep(0.01)
        assert {name: len(ids) for name, ids in asked(rig).items()} == {"quick": 3, "cheap": 3}


@pytest.mark.parametrize("levels", [None, pair_levels()])
async def test_the_slots_of_decodes_are_shared_where_prefills_compute_the_prompts(
    levels: Any, autojump_clock: MockClock
) -> None:
    workers = pair() if levels is None else pair_workers()
    async with routed(*workers, levels=levels, kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 6)
        assert sum(len(ids) for name, ids in asked(rig).items() if name.startswith("d")) == 3


@define(eq=False)
class Shared(Fake):
    """A worker that two routers ask; `more` are the other one's requests."""

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy + self.more, self.slots, own=self.busy, routers=2)


async def test_slots_that_another_router_uses_may_be_the_same_owners(autojump_clock: MockClock) -> None:
    worker = Shared("w", slots=8, more=3)
    async with routed(worker, kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 8)
        assert len(asked(rig)["w"]) == 3, "two of eight are kept, one for each router"
        await ask_many(nursery, rig, "bob", 1)
        assert len(asked(rig)["w"]) == 4


async def test_a_generation_that_continues_elsewhere_keeps_its_owners_count(autojump_clock: MockClock) -> None:
    workers = Fake("a", [Play(EngineLost("gone"), 3)], slots=2), Fake("b", slots=2)
    async with routed(*workers, kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 5)
        await trio.sleep(4)
        assert rig.routing.shares.statistics() == {"greedy": 3}


async def test_a_generation_that_goes_on_keeps_its_owners_slot_from_another_one(autojump_clock: MockClock) -> None:
    """The slot of a generation that an engine had put back went to the next one of its owner, and it took a kept slot."""
    worker = Fake("w", [Play(Preempted("later"), 3), Play(Preempted("later"), 3)], slots=4)
    async with routed(worker, kept_slots=1) as rig, trio.open_nursery() as nursery:
        await ask_many(nursery, rig, "greedy", 6, tokens_max=30)
        await trio.sleep(10)
        assert rig.routing.shares.statistics() == {"greedy": 3}
        began_at = trio.current_time()
        await ask(rig, of("bob"))
        assert trio.current_time() == pytest.approx(began_at + 6)


async def test_few_workers_are_looked_at_for_a_request_of_an_owner_with_few() -> None:
    looked: list[str] = []

    @define(eq=False)
    class Counted(Fake):
        @property
        def load(self) -> Load:
            looked.append(self.name)
            return Load(self.name, 0, self.slots)

    workers: list[Worker] = [Counted(f"w{number}") for number in range(1000)]
    shares = SlotShares(lambda: 1)
    for number in range(9):
        shares.take("alice", f"w{number}")
    assert shares.allows("alice", workers)
    assert looked == ["w0", "w1", "w2"], "eleven slots"
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("seed", range(10))
async def test_however_much_one_owner_asks_for_another_finds_a_slot_at_once(
    seed: int, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    workers = [Fake(f"w{number}", slots=rng.randint(1, 5)) for number in range(rng.randint(1, 3))]
    workers[0].slots += 1
    async with routed(*workers, inbox_size=rng.choice([2, 64]), kept_slots=1) as rig, trio.open_nursery() as nursery:

        async def be_greedy() -> None:
            for number in range(60):
                nursery.start_soon(ask, rig, of("greedy", number, rng.randint(1, 40), priority=rng.choice([0, 50])))
                await trio.sleep(rng.random())

        nursery.start_soon(be_greedy)
        for number in range(20):
            await trio.sleep(rng.random() * 5)
            began_at, tokens = trio.current_time(), rng.randint(1, 4)
            await ask(rig, of("bob", number, tokens))
            assert trio.current_time() == pytest.approx(began_at + tokens)
