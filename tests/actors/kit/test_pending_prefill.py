"""The bound of prompts inside an engine: enough to keep it busy, and the rest waits where owners take turns."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.slots.deadlines import Deadlines
from actors.engines.slots.slots import Slots
from actors.kit.pending_prefill import PendingPrefill
from actors.routing.load import Load
from actors.routing.ports import Worker
from actors.routing.reservations import Reservations
from protocol.errors import DeadlineExceeded, EngineStuck, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Sampling
from protocol.messages.text import Accepted, Respond
from protocol.token_ids import TokenIds
from supervisor.cluster.ranking import SortedRanking
from supervisor.config import load
from supervisor.config.schema import Cluster
from supervisor.engines.kinds import read_cluster
from supervisor.node.assembly import Assembly
from supervisor.supervision.supervise import supervise
from tests.rig.assembly import built_assembly
from tests.rig.calls import AnyAddress, AnyPriorityInbox, priority_inbox
from tests.rig.fake_engine import Costs, FakeEngine, running_engine
from tests.rig.tasks import append_result

ROOT = Path(__file__).parents[3]
LONG, ONE_S = 6_000, 0.6  # tokens, and what computing them takes
IDS = count(2**64, 2**16)  # far from the node's own
CLUSTER = f"""
[gateway]
port = 0
[model.tiny]
path = "{ROOT / "examples" / "tiny"}"
"""
ENGINE = """
[engine.{0}]
model = "tiny"
kind = "simulated"
leg = "{1}"
slots = 16
kv_tokens_max = 1_000_000
context_max = 8192
[engine.{0}.simulated.costs]
fixed_s = 0.01
per_prefill_token_s = 0.0001
"""


@asynccontextmanager
async def node(folder: Path, *legs: str) -> AsyncIterator[Assembly]:
    """Run what stands behind the gateway of a node."""
    text = "".join(ENGINE.format(f"{leg}-{number}", leg) for number, leg in enumerate(legs))
    (folder / "cluster.toml").write_text(CLUSTER + text)
    assembly, _ = built_assembly(read_cluster(folder / "cluster.toml"), "main")
    children = [child for child in assembly.tree.children if child.name != "gateway"]
    needs = [tuple(name for name in child.needs or () if name != "gateway") for child in children]
    tree = evolve(assembly.tree, children=tuple(map(lambda child, own: evolve(child, needs=own), children, needs)))
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: supervise(tree, rng=random.Random(0), task_status=task_status))
        yield assembly
        nursery.cancel_scope.cancel()


def prompts(many: int, size: int) -> tuple[Any, ...]:
    rng = random.Random(next(IDS))
    return tuple(tuple(rng.choices(range(1, 400), k=size)) for _ in range(many))


async def first_s(assembly: Assembly, owner: str, lists: tuple[tuple[int, ...], ...], tokens_max: int = 4) -> float:
    """Ask for an answer to each prompt, and return how long the first token of any of them took."""
    began_at, first_at = trio.current_time(), None
    wanted = Respond(f"{next(IDS):032x}", token_lists=lists, tokens_max=tokens_max, ignore_eos=True, owner=owner)
    assert assembly.gateway is not None
    async with assembly.gateway.runner.served["tiny"].ask.ask(wanted, 10**6) as replies:
        async for reply in replies:
            if first_at is None and not isinstance(reply, Accepted):
                first_at = trio.current_time()
    assert first_at is not None
    return first_at - began_at


def stall(assembly: Assembly, for_s: float) -> None:
    engine = assembly.directory.local["decode-1"].engine.current
    assert isinstance(engine, SimulatedEngine)
    engine.stall(for_s)


LEGS = pytest.mark.parametrize(
    "legs", [("both",), ("prefill", "decode"), ("prefill", "decode", "decode")], ids="-".join
)


@LEGS
@pytest.mark.parametrize("tokens_max", [4, 400])
async def test_the_many_long_prompts_of_a_key_delay_other_keys_by_one_turn(
    legs: tuple[str, ...], tokens_max: int, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with node(tmp_path, *legs) as assembly, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(first_s, assembly, "greedy", prompts(50, LONG), tokens_max)
        await trio.sleep(1)
        waited_s = await first_s(assembly, "honest", prompts(1, 20))
        # The prompt that is being computed, those for other decodes, and one turn of the other key.
        assert waited_s < (1 + max(1, legs.count("decode"))) * ONE_S + 0.1, waited_s
        nursery.cancel_scope.cancel()


@LEGS
async def test_what_waits_for_other_prompts_is_all_answered_and_nothing_of_it_is_left(
    legs: tuple[str, ...], autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with node(tmp_path, *legs) as assembly:
        async with trio.open_nursery() as nursery:
            for number in range(24):
                nursery.start_soon(first_s, assembly, f"key {number % 3}", prompts(3, 50 + 250 * number))
        workers = assembly.directory.workers("tiny")
        assert [(each.load.busy, each.load.pending) for each in workers] == [(0, 0)] * len(legs)


@pytest.mark.parametrize("size", [20, 300, LONG], ids="{} tokens".format)
async def test_a_decode_that_takes_nothing_keeps_a_prefill_only_from_itself(
    size: int, autojump_clock: MockClock, tmp_path: Path
) -> None:
    answered: list[float] = []
    async with node(tmp_path, "prefill", "decode", "decode") as assembly, trio.open_nursery() as nursery:
        stall(assembly, 1e6)
        for _ in range(3):
            for _ in range(25):
                nursery.start_soon(append_result, answered, first_s, assembly, "a", prompts(1, size))
            await trio.sleep(27 * ONE_S)
        # Half of the slots and of two chunks, and of longer prompts one.
        held = assembly.directory.local["decode-1"].in_flight.requests
        assert held == min(8, -(-2048 // size))
        assert len(answered) == 75 - held
        nursery.cancel_scope.cancel()


async def test_a_decode_that_takes_again_is_given_prompts_again(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with node(tmp_path, "prefill", "decode", "decode") as assembly, trio.open_nursery() as nursery:
        stall(assembly, 20)
        for _ in range(50):
            nursery.start_soon(first_s, assembly, "a", prompts(1, 300))
        await trio.sleep(19)
        assert [each.load.busy for each in assembly.directory.workers("tiny")] == [7, 7, 0]
        await trio.sleep(2)
        assert [each.load.busy for each in assembly.directory.workers("tiny")] == [0, 0, 0]


async def test_short_prompts_are_computed_together(autojump_clock: MockClock, tmp_path: Path) -> None:
    async with node(tmp_path, "both") as assembly:
        began_at = trio.current_time()
        await first_s(assembly, "a", prompts(16, 250), 1)
        # The first goes ahead by itself; the others are two steps of one chunk each.
        assert trio.current_time() - began_at < 0.6


# In an engine -----------------------------------------------------------------------------


def wanted(name: str, size: int = 4, tokens_max: int = 2) -> Generate:
    return Generate(name, TokenIds.of([1] * size), Sampling(tokens_max), owner=name[0])


@asynccontextmanager
async def working(
    most: int, costs: Costs | None = None, deadlines: Deadlines | None = None
) -> AsyncIterator[tuple[AnyAddress, FakeEngine, AnyPriorityInbox]]:
    address, inbox = priority_inbox(16, lambda _: 0, lambda request: request.owner)
    async with running_engine(FakeEngine(costs or Costs(slots=4))) as engine, trio.open_nursery() as nursery:
        deadlines = deadlines or Deadlines(release_s=1, first_token_s=5, gap_s=5, stuck_max=4)
        await nursery.start(decode, inbox, [Slots(engine, 4, deadlines)], most)
        yield address, engine, inbox
        nursery.cancel_scope.cancel()


async def ask(address: AnyAddress, request: Generate, leave_s: float = 1e3, after_s: float = 0.0) -> None:
    await trio.sleep(after_s)
    with trio.move_on_after(leave_s), suppress(RequestError):
        async with address.ask(request, request.sampling.tokens_max) as replies:
            await replies.result()


async def test_an_engine_has_no_more_prompts_than_it_may_and_a_longer_one(autojump_clock: MockClock) -> None:
    async with working(10) as (address, engine, _), trio.open_nursery() as nursery:
        for name, size in (("a", 4), ("b", 6), ("c", 1), ("d", 40)):
            nursery.start_soon(ask, address, wanted(name, size))
            await wait_all_tasks_blocked()
        assert engine.log == ["submit a", "submit b"]
        await trio.sleep(1.5)  # both have begun
        assert engine.log == ["submit a", "submit b", "submit c"], "the next one is not passed by what would fit"
        await trio.sleep(1)
        assert engine.log[3:] == ["ended a", "ended b", "submit d"]


async def test_behind_a_longer_prompt_are_as_many_others_as_there_may_be_without_it(autojump_clock: MockClock) -> None:
    async with working(10) as (address, engine, _), trio.open_nursery() as nursery:
        for name, size in (("a", 40), ("b", 4), ("c", 6), ("d", 1), ("e", 30)):
            nursery.start_soon(ask, address, wanted(name, size))
            await wait_all_tasks_blocked()
        assert engine.log == ["submit a", "submit b", "submit c"]
        await trio.sleep(1.5)  # all have begun
        assert engine.log[3:] == ["submit d"]
        await trio.sleep(1)
        assert engine.log[4:] == ["ended a", "ended b", "ended c", "submit e"], "it is alone again"


Ends: TypeAlias = dict[str, tuple[str, float]]


async def ask_and_note(ends: Ends, address: AnyAddress, request: Generate) -> None:
    try:
        async with address.ask(request, request.sampling.tokens_max) as replies:
            await replies.result()
            how = "answered"
    except DeadlineExceeded:
        how = "late"
    ends[request.id] = how, round(trio.current_time(), 2)


@pytest.mark.parametrize(
    ("prefill_s", "later_s", "expected"),
    [
        (0.12, 0.12, {"a": ("late", 5.0), "b": ("answered", 8.76), "c": ("answered", 8.76)}),
        (0.09, 0.09, {"a": ("answered", 6.32), "b": ("answered", 7.32), "c": ("answered", 7.32)}),
        (0.09, 0.9, {"b": ("late", 9.6), "c": ("late", 9.6), "a": ("answered", 12.8)}),
    ],
    ids=["it is late", "it is in time", "they are late themselves"],
)
async def test_the_time_of_prompts_behind_a_longer_one_begins_when_that_has_its_first_token_or_ends(
    prefill_s: float, later_s: float, expected: Ends, autojump_clock: MockClock
) -> None:
    costs, ends, deadlines = Costs(prefill_s=prefill_s), Ends(), Deadlines(release_s=1, first_token_s=5, gap_s=20)
    async with working(10, costs, deadlines) as (address, engine, _), trio.open_nursery() as nursery:
        nursery.start_soon(ask_and_note, ends, address, wanted("a", 40))
        await trio.sleep(0.1)  # it is being computed
        for name in "bc":
            nursery.start_soon(ask_and_note, ends, address, wanted(name, 4))
        await wait_all_tasks_blocked()
        assert sorted(engine.log) == ["submit a", "submit b", "submit c"]
        costs.prefill_s = later_s
    assert ends == expected


@pytest.mark.realtime
async def test_an_engine_that_stands_still_behind_a_longer_prompt_is_found_as_soon_as_any() -> None:
    """In real time the replies of one turn are not of one instant."""
    costs, deadlines = Costs(step_s=0.05, prefill_s=0.01), Deadlines(first_token_s=1, gap_s=1, release_s=0.2, leak_s=60)
    with trio.fail_after(20), pytest.RaisesGroup(EngineStuck, flatten_subgroups=True):
        async with working(10, costs, deadlines) as (address, engine, _), trio.open_nursery() as nursery:
            nursery.start_soon(ask, address, wanted("b", 4), 1e3, 0.1)
            await ask(address, wanted("a", 40, 1))
            engine.stall(1e3)
            await trio.sleep_forever()


ENDS = {
    "ends": (Costs(slots=4), 1e3),
    "leaves before it begins": (Costs(slots=4), 0.5),
    "leaves in the middle": (Costs(slots=4), 1.5),
    "is too late": (Costs(slots=4, prefill_s=1.8), 1e3),
    "is refused": (Costs(slots=4, refused=lambda name: name.startswith("first")), 1e3),
    "keeps its slot": (Costs(slots=4, stuck=True), 0.5),
    "keeps its slot in the middle": (Costs(slots=4, stuck=True), 1.5),
}


@pytest.mark.parametrize("how", ENDS)
async def test_room_for_prompts_comes_back_however_a_request_ends(how: str, autojump_clock: MockClock) -> None:
    costs, leave_s = ENDS[how]
    async with working(10, costs) as (address, _, inbox):
        for name in ("first", "first again", "first once more"):
            await ask(address, wanted(name, 9), leave_s)
        costs.prefill_s, costs.refused = 0.0, lambda _: False
        with trio.fail_after(10):
            async with address.ask(wanted("last", 10), 2) as replies:
                assert await replies.result() is not None
        assert inbox.waiting == (0, 0)


async def test_an_asker_that_waited_for_room_and_left_delays_no_one(autojump_clock: MockClock) -> None:
    async with working(10, Costs(slots=4, prefill_s=1)) as (address, engine, _), trio.open_nursery() as nursery:
        nursery.start_soon(ask, address, wanted("a", 4))
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, address, wanted("b", 40), 1)
        await trio.sleep(2)
        nursery.start_soon(ask, address, wanted("c", 4))
        await wait_all_tasks_blocked()
        assert engine.log == ["submit a", "submit c"]


@pytest.mark.parametrize("room", [1, 16], ids=["for room in the queue", "in the queue"])
async def test_the_call_behind_one_that_leaves_enters_at_once(room: int, autojump_clock: MockClock) -> None:
    address, inbox = priority_inbox(room, lambda _: 0)
    got = []

    async def take() -> None:
        while True:
            got.append((await inbox.receive(lambda request: len(request.tokens) < 9)).request.id)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        leaving = [wanted(name, 40) for name in "ab"]
        for number, request in enumerate((*leaving, wanted("c", 4)), start=1):
            nursery.start_soon(ask, address, request, number if request in leaving else 1e3)
            await wait_all_tasks_blocked()
        await trio.sleep(2.5)
        assert got == ["c"]
        nursery.cancel_scope.cancel()


def test_room_that_is_given_back_twice_is_one_room() -> None:
    pending = PendingPrefill(10)
    pending.add("a", 4)
    pending.add("b", 30)
    assert [pending.discard(key) for key in ("a", "a", "b", "c")] == [True, False, True, False]
    assert (pending.tokens, pending.fits(10), pending.fits(11)) == (0, True, True)
    pending.add("c", 1)
    assert (pending.fits(9), pending.fits(10)) == (True, False)
    pending.add("d", 30)
    assert [pending.fits_behind_longer(size) for size in (9, 10, 30)] == [True, False, False]
    assert not pending.fits(1)


# At a router ------------------------------------------------------------------------------


def test_a_worker_with_prompts_enough_is_behind_all_that_have_room() -> None:
    loads = [Load("a", 0, 4, 0, 0, 0, 8, 8), Load("b", 3, 4, 0, 0, 0, 7, 8), Load("c", 2, 4, 0, 0, 0, 99, 0)]
    assert [load.full for load in loads] == [True, False, False]
    ranked = SortedRanking.of([cast("Worker", SimpleNamespace(load=load)) for load in loads])
    assert [worker.load.name for worker in ranked] == ["c", "b", "a"]


def held(places: Reservations, decode: str, *sizes: int) -> None:
    for size in sizes:
        places.add("p", decode, size)


def test_a_decode_has_its_share_of_a_prefill_and_always_one_prompt() -> None:
    prefill, places = Load("p", 0, 8, shared_max=100), Reservations()
    held(places, "a", 49)
    assert [places.has_room(prefill, each, 2) for each in "ab"] == [True, True]
    held(places, "a", 1)
    assert [places.has_room(prefill, each, 2) for each in "ab"] == [False, True]
    assert places.has_room(prefill, "a", 1), "the other one is gone"
    held(places, "b", 9_000)
    assert [places.has_room(prefill, each, 3) for each in "abc"] == [False, False, True]
    for each, size in (("a", 49), ("a", 1), ("b", 9_000)):
        places.discard("p", each, size)
    assert [places.has_room(prefill, each, 2) for each in "ab"] == [True, True]
    assert not places.pending


# In cluster.toml --------------------------------------------------------------------------


def test_the_bound_of_pending_prompts_is_a_key_of_engines_that_compute_them(tmp_path: Path) -> None:
    text = CLUSTER + ENGINE.format("prefill", "prefill") + ENGINE.format("decode", "decode")
    (tmp_path / "cluster.toml").write_text(text.replace("slots", "pending_prefill_tokens_max = 9\nslots"))
    with pytest.raises(load.FileMistakes, match=r"decode\.pending_prefill_tokens_max: is for engines that compute"):
        read_cluster(tmp_path / "cluster.toml")
    (tmp_path / "cluster.toml").write_text(text.replace("slots", "pending_prefill_tokens_max = 9\nslots", 1))
    cluster: Cluster = read_cluster(tmp_path / "cluster.toml")
    assembly, _ = built_assembly(cluster, "main")
    bounds = {offer.leg: offer.pending_prefill_tokens_max for offer in assembly.directory.offers("tiny")}
    assert bounds == {Leg.PREFILL: 9, Leg.DECODE: 0}
