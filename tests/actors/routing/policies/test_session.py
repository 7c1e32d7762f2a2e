"""The policy `session`."""

from __future__ import annotations

from collections import Counter

from attrs import evolve

from actors.routing.load import Load
from actors.routing.policies.session import BySession, SessionWorkers
from protocol.messages.cluster import Leg
from protocol.messages.generation import RoutingHints
from tests.rig.router import Loads, generate

FOUR = [Load(f"w{place}", place, 10) for place in range(4)]


def chosen(policy: BySession, session: str, loads: list[Load], *, is_taken: bool = True) -> str | None:
    choice = policy(evolve(generate(), hints=RoutingHints(session)), Loads(loads))
    if choice is not None and choice.on_taken is not None and is_taken:
        choice.on_taken()
    return None if choice is None else choice.load.name


def test_a_session_stays_at_its_worker_and_sessions_are_spread() -> None:
    policy = BySession()
    first = [chosen(policy, f"s{number}", FOUR) for number in range(400)]
    assert [chosen(policy, f"s{number}", FOUR) for number in range(400)] == first
    assert min(Counter(first).values()) > 70
    assert [chosen(BySession(), f"s{number}", FOUR[::-1]) for number in range(400)] == first, "of another router"


def test_a_session_that_had_to_move_stays_where_it_has_moved_to() -> None:
    policy = BySession()
    home = chosen(policy, "s", FOUR)
    others = [load for load in FOUR if load.name != home]
    moved = chosen(policy, "s", others)
    assert moved != home
    assert chosen(policy, "s", FOUR) == moved
    assert chosen(policy, "s", []) is None


def test_a_choice_that_comes_to_nothing_moves_no_session() -> None:
    policy = BySession()
    home = chosen(policy, "s", FOUR)
    others = [load for load in FOUR if load.name != home]
    assert chosen(policy, "s", others, is_taken=False) != home
    assert chosen(policy, "s", FOUR) == home


def test_a_session_has_a_worker_for_each_leg() -> None:
    policy = BySession()
    prefills = [evolve(load, leg=Leg.PREFILL, name=f"p{load.name}") for load in FOUR]
    decodes = [evolve(load, leg=Leg.DECODE, name=f"d{load.name}") for load in FOUR]
    pair = chosen(policy, "s", prefills), chosen(policy, "s", decodes)
    assert (chosen(policy, "s", prefills[::-1]), chosen(policy, "s", decodes[::-1])) == pair


def test_without_a_session_the_least_loaded_is_chosen() -> None:
    choice = BySession()(generate(), Loads(FOUR[::-1]))
    assert choice is not None
    assert choice.load.name == "w0"
    assert chosen(BySession(), "", FOUR[::-1]) == "w0"


def test_the_least_recently_used_session_is_forgotten() -> None:
    workers = SessionWorkers(2)
    for session in ("a", "b", "a", "c"):
        workers.set(Leg.BOTH, session, session.upper(), "alice")
    assert [workers.get(Leg.BOTH, session) for session in "abc"] == ["A", None, "C"]


def test_an_owner_with_many_sessions_pushes_out_its_own_alone() -> None:
    workers = SessionWorkers(8)
    for number in range(100):
        for leg in (Leg.PREFILL, Leg.DECODE):
            workers.set(leg, "of bob", "B", "bob")
            workers.set(leg, f"of alice {number}", "A", "alice")
    for leg in (Leg.PREFILL, Leg.DECODE):
        assert workers.get(leg, "of bob") == "B"
        assert [workers.get(leg, f"of alice {number}") for number in (96, 97, 98, 99)] == [None, "A", "A", "A"]


def test_a_session_belongs_to_its_last_owner() -> None:
    workers = SessionWorkers(3)
    workers.set(Leg.BOTH, "shared", "X", "alice")
    workers.set(Leg.BOTH, "shared", "Y", "bob")
    for number in range(5):
        workers.set(Leg.BOTH, f"{number}", "A", "alice")
    assert workers.get(Leg.BOTH, "shared") == "Y"


def test_a_chosen_worker_is_remembered_for_the_owner_of_the_request() -> None:
    policy = BySession(SessionWorkers(2))
    for number in range(4):
        for owner, session in (("bob", "mine"), ("alice", f"{number}")):
            choice = policy(evolve(generate(), owner=owner, hints=RoutingHints(session)), Loads(FOUR))
            assert choice is not None
            assert choice.on_taken is not None
            choice.on_taken()
    assert policy.workers.get(Leg.BOTH, "mine") is not None
