"""The policy `least_loaded`, and what a policy is asked about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve
from hypothesis import given
from hypothesis import strategies as st

from actors.routing.candidates import Candidates, Choice
from actors.routing.load import Load
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.reservations import Reservations
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from tests.rig.router import Fake, FakePool, Loads, generate, prefill_info

names, tokens_held = st.text("abc", max_size=3), st.integers(0, 99)
every_load = st.lists(st.builds(Load, names, st.integers(0, 12), st.integers(0, 8), tokens_held), max_size=9)


def least_of(loads: Sequence[Load], request: Generate | None = None) -> Load:
    choice = least_loaded(request or generate(), Loads(loads))
    assert choice is not None
    return choice.load


def last(_: Generate, candidates: Candidates) -> Choice | None:
    loads = list(candidates)
    return Choice(loads[-1]) if loads else None


loads = every_load.map(lambda every: [load for load in every if not load.full]).filter(bool)


@given(loads)
def test_the_least_loaded_is_chosen(every: list[Load]) -> None:
    chosen = least_of(every)
    assert all(chosen.busy * load.slots <= load.busy * chosen.slots for load in every)
    same = [load for load in every if load.busy * chosen.slots == chosen.busy * load.slots]
    assert chosen.tokens == min(load.tokens for load in same)


@given(every_load)
def test_a_policy_is_asked_about_workers_with_room_alone(every: list[Load]) -> None:
    seen: list[Load] = []

    def policy(request: Generate, candidates: Candidates) -> Choice | None:
        choice = last(request, candidates)
        if choice is not None:
            seen.extend(candidates)
        return choice

    workers = [Fake(f"{place}", slots=load.slots, more=load.busy) for place, load in enumerate(every)]
    for worker in workers:
        worker.pool = FakePool(workers, None)
    routing = Routing(FakePool(workers, None), policy, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    with_room = [worker for worker in workers if worker.more < worker.slots]
    assert routing.has_room() == bool(with_room)
    assert not seen, "whether there is room is no question of policy"
    route = routing.choose(generate())
    assert (None if route is None else route.name) == (with_room[-1].name if with_room else None)
    assert [load.name for load in seen] == [worker.name for worker in with_room]


@define(eq=False)
class SharedWorker(Fake):
    """A worker that other routers ask, too."""

    @property
    def load(self) -> Load:
        return Load(self.name, self.more, self.slots, leg=self.leg, routers=2)


async def test_a_request_waits_at_a_full_worker_only_while_no_other_could_begin_it() -> None:
    def chosen(*workers: Fake) -> list[str | None]:
        routing = Routing(FakePool([*workers], None), last, FailoverLimits(), lambda: 1, lambda: "", 100, frozenset())
        names = list[str | None]()
        for choose in (routing.choose_idle, routing.choose):
            route = choose(generate(), ())
            names.append(None if route is None else route.name)
            if route is not None:
                route.end()
        return names

    idle, full = SharedWorker("idle", more=3), SharedWorker("full", more=4)
    pair = [SharedWorker("p", leg=Leg.PREFILL, info=prefill_info()), SharedWorker("d", leg=Leg.DECODE)]
    assert chosen(idle, full) == ["idle", "idle"], "whatever the policy prefers"
    assert chosen(full) == [None, "full"]
    assert chosen(full, *pair) == ["p+d", "p+d"], "although the prompt is short"
    pair[0].more = 4
    assert chosen(*pair) == [None, "p+d"]
    assert chosen(idle, *pair) == ["idle", "idle"]


memories = st.builds(
    Load,
    st.text("abc", max_size=3),
    st.integers(0, 3),
    st.integers(1, 4),
    kv_tokens=st.integers(0, 9),
    kv_tokens_max=st.integers(0, 9),
)


@given(st.lists(memories, min_size=1, max_size=6), st.integers(0, 9))
def test_one_whose_memory_has_room_is_chosen(every: list[Any], tokens: int) -> None:
    request = generate(prompt=[], tokens_max=tokens)
    chosen = least_of(every, request)
    assert chosen.fits(request) == any(load.fits(request) for load in every)


def test_a_prefill_holds_the_prompt_of_a_request_and_others_all_that_it_may_come_to() -> None:
    request = generate(prompt=[1] * 6, tokens_max=3)
    held = {leg: Load("a", 0, 1, leg=leg).kv_tokens_with(request) for leg in Leg if leg not in {Leg.ENCODE, Leg.EMBED}}
    assert held == {Leg.PREFILL: 6, Leg.DECODE: 9, Leg.BOTH: 9}
    assert [Load("a", 0, 1, kv_tokens_max=8, leg=leg).fits(request) for leg in (Leg.PREFILL, Leg.BOTH)] == [True, False]
    assert Load("a", 0, 1, kv_tokens_max=8).fits(request, cached=1)


def test_a_router_with_less_than_its_share_may_let_one_request_wait_at_a_full_worker() -> None:
    full = Load("a", 4, 4)
    assert full.full
    shared = evolve(full, routers=2)
    assert not shared.full, "it has none of the four"
    assert not evolve(shared, own=1).full
    assert evolve(shared, own=2).full, "it has its share"
    assert evolve(shared, own=1, unstarted=1).full, "one waits there already"
    assert evolve(shared, pending=9, pending_max=9).full, "prompts enough are pending"
    assert not Load("a", 1, 1, routers=3).full, "each may have one request at a worker with one slot"
    assert Load("a", 1, 1, routers=3, own=1, unstarted=1).full
    assert Reservations(Counter(a=1), Counter(a=8)).with_reserved(shared).full
