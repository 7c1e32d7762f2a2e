"""The candidates of a policy: which workers they are, and how far they are looked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import Factory, define, evolve

from actors.routing.candidates import Candidates, Choice, EligibleCandidates
from actors.routing.load import BeginsNow, HasRoom, Load, begins, has_room
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.generation import Generate
from tests.rig.router import Fake, FakePool, generate


@define(eq=False)
class Ranked:
    """Workers in the order of this list, and those that were looked at."""

    workers: list[Fake]
    looked_at: list[str] = Factory(list)

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Fake]:
        for worker in self.workers:
            self.looked_at.append(worker.name)
            yield worker

    def get(self, name: str) -> Fake | None:
        return next((worker for worker in self.workers if worker.name == name), None)


def candidates(
    workers: Ranked | Sequence[Fake],
    *,
    room: HasRoom = has_room,
    excluded: Sequence[str] = (),
    ejected: Sequence[str] = (),
    reserved: Sequence[str] = (),
) -> EligibleCandidates:
    def with_reserved(load: Load) -> Load:
        return evolve(load, busy=load.busy + 1, reserved=1) if load.name in reserved else load

    return EligibleCandidates(
        workers,
        ranked=isinstance(workers, Ranked),
        has_room=room,
        excluded=excluded,
        avoided=ejected.__contains__ if ejected else None,
        with_reserved=with_reserved,
    )


def names(loads: Sequence[Load] | EligibleCandidates) -> list[str]:
    return [load.name for load in loads]


FOUR = [Fake(name, more=more) for name, more in (("a", 0), ("b", 1), ("c", 4), ("d", 2))]


def test_full_excluded_and_ejected_workers_are_none() -> None:
    assert names(candidates(FOUR)) == ["a", "b", "d"]
    assert names(candidates(FOUR, excluded=["a"], ejected=["b"])) == ["d"]
    assert candidates(FOUR, excluded=["a"]).find("a") is None
    assert candidates(FOUR, ejected=["b"]).find("b") is None
    assert candidates(FOUR).find("c") is None
    assert candidates(FOUR).find("nobody") is None


def test_ejected_workers_are_candidates_while_all_others_are_ejected_too() -> None:
    assert names(candidates(FOUR[:2], ejected=["a", "b"])) == ["a", "b"]
    assert names(candidates(FOUR[:2], excluded=["b"], ejected=["a"])) == ["a"]


@define(eq=False)
class Computing(Fake):
    """A worker with prompts that have not begun, of which its engine takes 100 tokens at a time."""

    pending: int = 0

    @property
    def load(self) -> Load:
        return Load(self.name, self.more, self.slots, pending=self.pending, pending_max=100)


def test_a_worker_with_prompts_enough_is_found_by_its_name_alone() -> None:
    workers = [Computing("a"), Computing("b", pending=100), Computing("c", pending=399), Computing("d", pending=400)]
    found = candidates(workers, room=begins)
    assert names(found) == names(found.leading(generate())) == ["a"]
    assert [name for name in "abcd" if found.find(name) is not None] == ["a", "b", "c"]
    assert candidates([Computing("b", pending=100, more=4)]).find("b") is None, "it has no slot"


async def test_a_policy_may_let_a_prompt_wait_but_not_one_that_moves() -> None:
    def computing(_: Generate, candidates: Candidates) -> Choice | None:
        load = candidates.find("b")
        return None if load is None else Choice(load)

    pool = FakePool([Computing("a"), Computing("b", pending=100)], None)
    routing = Routing(pool, computing, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    assert routing.choose_idle(generate(), ()) is None
    route = routing.choose(generate())
    assert route is not None
    assert route.name == "b"


def test_a_reservation_takes_the_last_slot() -> None:
    one = [Fake("a", slots=1), Fake("b", slots=2)]
    assert names(candidates(one, reserved=["a", "b"], room=begins)) == ["b"]
    assert candidates(one, reserved=["a"]).find("a") is None


def test_ranked_workers_are_looked_at_up_to_the_first_that_nothing_speaks_against() -> None:
    ranked = Ranked([Fake(f"w{number}", more=number // 3) for number in range(12)])
    found = candidates(ranked, reserved=["w0"])
    assert names(found.leading(generate())) == ["w0", "w1"]
    assert ranked.looked_at == ["w0", "w1"]


def test_of_ranked_workers_those_behind_one_without_memory_are_candidates_for_a_move() -> None:
    large, request = Tight("large"), generate()
    workers = Ranked([large, Fake("a"), Fake("full", more=8), Fake("b")])
    assert names(candidates(workers, room=BeginsNow(request))) == ["a"]
    assert workers.looked_at == ["large", "a", "full"], "whose followers have no slot either"


@define(eq=False)
class Tight(Fake):
    """A worker with slots and without KV memory."""

    @property
    def load(self) -> Load:
        return Load(self.name, 0, self.slots, 0, 100, 100)
