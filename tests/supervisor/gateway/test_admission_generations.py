"""Admission counts the generations of a request: no client, and no crowd of requests, takes the places of others."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.kit.fair_queue import FairQueue
from actors.kit.shares import BudgetLimits
from protocol.errors import BadRequest, Overloaded
from supervisor.config.keyfile import KeySection
from supervisor.gateway.admission import AdmissionGate, AdmissionStatistics
from supervisor.gateway.keys.key_sources import KeySources, digest
from supervisor.gateway.keys.keys import ClientKey
from tests.rig.gateway import at_rest, gateway_client, gateway_rig, post
from tests.rig.work import instructions

Log = list[tuple[Any, ...]]
Waiter = tuple[str, float, dict[str, Any]]

# The gate ------------------------------------------------------------------------------------------


async def hold(gate: AdmissionGate, log: Log, name: str, for_s: float = 1.0, **asked: Any) -> None:
    try:
        async with gate.admitted(**asked):
            log.append((trio.current_time(), name))
            await trio.sleep(for_s)
    except (Overloaded, BadRequest) as error:
        log.append((trio.current_time(), name, error.code))


async def run_requests(gate: AdmissionGate, log: Log, *waiters: Waiter) -> None:
    """Start requests, each as `(name, for_s, fields)`, in this order and at the same time."""
    async with trio.open_nursery() as nursery:
        for name, for_s, asked in waiters:
            nursery.start_soon(partial(hold, gate, log, name, for_s, **asked))
            await wait_all_tasks_blocked()
    assert (gate.inside, gate.waiting) == (0, 0)
    assert not gate.statistics().by_owner


def make_gate(requests_max: int, admit_s: float = 60.0, waiting_max: int = 100) -> AdmissionGate:
    return AdmissionGate(requests_max, admit_s, waiting_max, lambda: None)


async def test_places_are_counted_in_generations(autojump_clock: MockClock) -> None:
    gate, log = make_gate(10), Log()
    await run_requests(gate, log, ("a", 5, {"weight": 6}), ("b", 5, {"weight": 5}), ("c", 5, {"weight": 4}))
    assert sorted(log) == [(0, "a"), (5, "b"), (5, "c")], "requests of one owner are admitted in their order"


async def test_the_owner_that_holds_least_is_admitted_first(autojump_clock: MockClock) -> None:
    gate, log = make_gate(4), Log()
    a, b = {"owner": "a"}, {"owner": "b"}
    waiters = [("a0", 10, a), ("a1", 20, a), ("a2", 20, a), ("b0", 30, b), ("a3", 1, a), ("a4", 1, a), ("b1", 1, b)]
    await run_requests(gate, log, *waiters)
    assert log[4:] == [(10, "b1"), (11, "a3"), (12, "a4")]


async def test_many_requests_of_two_owners_do_not_delay_a_third(autojump_clock: MockClock) -> None:
    gate, log = make_gate(8), Log()
    crowds = [(f"{owner}{n}", 1, {"owner": owner, "weight": 4}) for n in range(15) for owner in "ab"]
    await run_requests(gate, log, *crowds, ("c", 1, {"owner": "c"}))
    assert (2.0, "c") in log, "each other owner has one turn before it, not all of its turns"


async def test_a_request_above_the_limit_of_its_owner_is_admitted_alone(autojump_clock: MockClock) -> None:
    gate, log = make_gate(8), Log()
    mine = {"owner": "a", "limits": BudgetLimits(8, 3)}
    await run_requests(
        gate,
        log,
        ("small", 5, mine),
        ("large", 5, {"owner": "a", "weight": 6, "limits": BudgetLimits(8, 6)}),
        ("small too", 5, mine),
    )
    assert log == [(0, "small"), (5, "large"), (10, "small too")]


async def test_one_of_several_keys_leaves_places_even_in_one_request(autojump_clock: MockClock) -> None:
    gate, log, limits = make_gate(32), Log(), BudgetLimits.of_all_sizes(32, 192)
    mine = {"owner": "a", "limits": limits}
    other = {"owner": "b", "limits": limits}
    await run_requests(
        gate, log, ("too many", 5, {**mine, "weight": 25}), ("many", 5, {**mine, "weight": 24}), ("small", 1, other)
    )
    assert log == [(0, "too many", "invalid_request"), (0, "many"), (0, "small")]


async def test_small_requests_pass_a_large_one_for_which_all_other_places_are_kept(autojump_clock: MockClock) -> None:
    """It had been overtaken by as many as it weighs: then each request of every other key waited behind it."""
    gate, log, limits = make_gate(32), Log(), BudgetLimits.of_all_sizes(32)
    large = [(name, 50.0, {"owner": name, "weight": 15, "limits": limits}) for name in "ab"]
    small = [(f"{name}{n}", 1.0, {"owner": name, "limits": limits}) for n in range(20) for name in "cd"]
    await run_requests(gate, log, *large, ("large", 50.0, {"owner": "e", "weight": 15, "limits": limits}), *small)
    assert (50, "large") in log
    assert max(at for at, name in log if name[0] in "cd") < 45, "two at a time"


async def test_no_request_takes_the_places_that_are_reserved_for_a_large_one(autojump_clock: MockClock) -> None:
    """Half of the places are the fair share of the large one: they are reserved for it as they become free."""
    gate, log, small = make_gate(8, admit_s=1000), Log(), {"owner": "b"}

    async def keep_coming(nursery: trio.Nursery, number: int) -> None:
        await trio.sleep(number / 8)
        for turn in range(20):
            await hold(gate, log, f"b{number}.{turn}", 1.0, **small)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(keep_coming, nursery, number)
        await trio.sleep(2.05)
        nursery.start_soon(lambda: hold(gate, log, "large", 1.0, owner="a", weight=4))
    entered = next(at for at, name, *_ in log if name == "large")
    assert entered == 2.5
    assert [name for at, name, *_ in log if 2.05 < at <= entered] == ["large"]


async def test_a_large_request_of_an_owner_with_its_share_reserves_nothing(autojump_clock: MockClock) -> None:
    gate, log = make_gate(8, admit_s=50), Log()
    waiters: list[Waiter] = [
        ("a0", 100, {"owner": "a", "weight": 4}),
        ("b0", 1, {"owner": "b", "weight": 3}),
        ("a1", 1, {"owner": "a", "weight": 4}),
        *((f"b{n}", 1, {"owner": "b"}) for n in range(1, 30)),
    ]
    await run_requests(gate, log, *waiters)
    assert [at for at, name, *rest in log if name == "a1" and rest] in ([], [50.0])
    assert all(not rest for _, name, *rest in log if name.startswith("b"))
    assert max(at for at, name, *_ in log if name.startswith("b")) <= 12, "four at a time, with none reserved"


async def test_a_full_queue_drops_the_last_request_of_the_owner_with_most(autojump_clock: MockClock) -> None:
    gate, log = make_gate(1, waiting_max=4), Log()
    crowd = [(f"a{n}", 10, {"owner": "a"}) for n in range(5)]
    await run_requests(
        gate, log, *crowd, ("b", 10, {"owner": "b"}), ("a5", 10, {"owner": "a"}), ("c", 10, {"owner": "c"})
    )
    refused = [name for _, name, *rest in log if rest]
    assert refused == ["a4", "a5", "a3"]
    assert next(name for _, name, *rest in log if not rest) == "a0"


@pytest.mark.parametrize("mine", ["a", "b", "c"])
async def test_a_full_queue_refuses_an_owner_with_as_many_requests_in_it(mine: str, autojump_clock: MockClock) -> None:
    gate, log = make_gate(1, waiting_max=2), Log()
    waiters = [(name, 10, {"owner": name}) for name in "xab"]
    await run_requests(gate, log, *waiters, ("late", 10, {"owner": mine}))
    assert [name for _, name, *rest in log if rest] == ["late"]


async def test_a_cancelled_request_frees_its_reserved_places(autojump_clock: MockClock) -> None:
    gate, log = make_gate(4, admit_s=60), Log()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: hold(gate, log, "b0", 100, owner="b", weight=3))
        await wait_all_tasks_blocked()
        with trio.move_on_after(5):
            nursery.start_soon(lambda: hold(gate, log, "b1", 1, owner="b", weight=1))
            await wait_all_tasks_blocked()
            nursery.start_soon(lambda: hold(gate, log, "b2", 1, owner="b", weight=1))
            await hold(gate, log, "a", 1, owner="a", weight=4)
    assert next(at for at, name, *_ in log if name == "b2") <= 5
    assert (gate.inside, gate.waiting) == (0, 0)


async def test_a_heavy_request_that_times_out_lets_the_others_in(autojump_clock: MockClock) -> None:
    gate, log = make_gate(4, admit_s=3), Log()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: hold(gate, log, "b", 100, owner="b"))
        for number in range(12):
            nursery.start_soon(partial(hold, gate, log, f"small {number}", owner="c"))
        await wait_all_tasks_blocked()
        nursery.start_soon(lambda: hold(gate, log, "heavy", owner="a", weight=4))
    assert (3, "heavy", "overloaded") in log
    assert max(at for at, name, *_ in log if name.startswith("small")) >= 3
    assert (gate.inside, gate.waiting) == (0, 0)


async def walked(keys: int) -> int:
    """Return the work of a walk along a queue of this many keys in which no request fits, in instructions."""
    gate = make_gate(16, waiting_max=3000)

    async def stay(number: int) -> None:
        async with gate.admitted(owner=f"key {number}", weight=15 + (number == 0)):
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for number in range(keys):
            nursery.start_soon(stay, number)
        await wait_all_tasks_blocked()
        gate.requests_max = 17  # so that one more is free, which fits nobody
        work = instructions(gate._admit)  # noqa: SLF001
        assert gate.waiting == keys - 1
        nursery.cancel_scope.cancel()
    return work


@pytest.mark.turns_exempt("hundreds come and go at once")
async def test_the_work_of_one_release_is_linear_in_the_waiting_keys(autojump_clock: MockClock) -> None:
    few, many = await walked(50), await walked(400)
    assert few > 50
    assert many < 10 * few


OWNER = st.sampled_from("abc")
COMING = st.lists(st.tuples(OWNER, st.integers(1, 4), st.integers(0, 1), st.integers(0, 9)), max_size=30)


@given(requests_max=st.integers(4, 6), waiting_max=st.integers(1, 5), coming=COMING, seed=st.integers(0, 99))
def test_in_any_order_of_requests_the_limits_hold_and_no_place_stays_free(
    requests_max: int, waiting_max: int, coming: list[tuple[str, int, int, int]], seed: int
) -> None:
    async def main() -> None:
        queue, rng = FairQueue[Any](), random.Random(seed)
        gate = AdmissionGate(requests_max, 60.0, waiting_max, lambda: None, queue=queue)
        scopes: list[trio.CancelScope] = []

        async def stay(owner: str, weight: int, priority: int, scope: trio.CancelScope) -> None:
            with scope:
                try:
                    async with gate.admitted(
                        priority, owner=owner, weight=weight, limits=BudgetLimits(requests_max, 4)
                    ):
                        await trio.sleep_forever()
                except Overloaded:
                    pass
            scopes.remove(scope)

        async with trio.open_nursery() as nursery:
            for owner, weight, priority, leaves in coming:
                scopes.append(scope := trio.CancelScope())
                nursery.start_soon(stay, owner, weight, priority, scope)
                if leaves > 6 and scopes:
                    rng.choice(scopes).cancel()
                await wait_all_tasks_blocked()
                assert gate.inside <= requests_max
                assert gate.waiting <= waiting_max
                held = gate.statistics().by_owner
                assert gate.inside == sum(held.values())
                assert all(each <= 4 for each in held.values())
                smallest = min((each.weight for each in queue if each.owner not in held), default=9)
                assert gate.inside + smallest > requests_max or queue.owners > 1
            for scope in scopes:
                scope.cancel()
        assert gate.statistics() == AdmissionStatistics(0, 0, {})

    trio.run(main)


# Keys ----------------------------------------------------------------------------------------------


def test_the_concurrency_of_a_key_counts_generations() -> None:
    key = ClientKey("alice", KeySection(sha256=digest("x" * 30), concurrency_max=4))
    with key.generating(3):
        with (
            pytest.raises(Exception, match="has 3 answers running, and asks for 2 more; it may have 4"),
            key.generating(2),
        ):
            pass
        with key.generating(1):
            assert key.running == 4
    assert key.running == 0
    with pytest.raises(BadRequest, match=r"may have 4 \(concurrency_max\)") as caught, key.generating(5, "n"):
        pass
    assert caught.value.param == "n"


def texts(**fields: int) -> dict[Any, Any]:
    return {"model": "tiny", "prompt": "n=3", **fields}


async def test_a_key_with_a_concurrency_of_1_cannot_request_128_choices(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[key.alice]\nsha256 = "{digest("a" * 30)}"\nconcurrency_max = 1\n')
    async with gateway_rig(requests_max=256) as rig:
        rig.gateway.keys.sources = KeySources(file)
        rig.gateway.keys.load()
        client = await rig.client()
        key = {"authorization": f"Bearer {'a' * 30}"}
        reply = await client.ask(post(texts(n=128), "/v1/completions", **key))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", "n")
        assert "concurrency_max" in reply.error["message"]
        assert (await client.ask(post(texts(), "/v1/completions", **key))).status == 200
        await client.stream.aclose()
        await at_rest(rig)


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 9}, "n"), ({"best_of": 9}, "best_of"), ({"prompt": ["n=3"] * 9}, "prompt")]
)
async def test_more_choices_than_the_gateway_admits_are_refused_by_their_field(
    fields: dict[str, Any], param: str, autojump_clock: MockClock
) -> None:
    async with gateway_client(requests_max=8) as (rig, client):
        reply = await client.ask(post(texts(**fields), "/v1/completions"))
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "requests_max" in reply.error["message"]
        assert (await client.ask(post(texts(n=8), "/v1/completions"))).status == 200
        await client.stream.aclose()
        await at_rest(rig)
