"""The candidates of a policy: which workers they are, and how far they are looked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import Factory, define, evolve

from actors.routing.candidates import WorkerCandidates
from actors.routing.load import HasRoom, Load, begins, has_room
from protocol.cluster import Leg
from tests.rig.router import Fake, generate


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
) -> WorkerCandidates:
    def with_reserved(load: Load) -> Load:
        return evolve(load, busy=load.busy + 1, reserved=1) if load.name in reserved else load

    return WorkerCandidates(
        workers,
        ranked=isinstance(workers, Ranked),
        has_room=room,
        excluded=excluded,
        avoided=ejected.__contains__ if ejected else None,
        with_reserved=with_reserved,
    )


def names(loads: Sequence[Load] | WorkerCandidates) -> list[str]:
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


def test_a_reservation_takes_the_last_slot() -> None:
    one = [Fake("a", slots=1), Fake("b", slots=2)]
    assert names(candidates(one, reserved=["a", "b"], room=begins)) == ["b"]
    assert candidates(one, reserved=["a"]).find("a") is None


def test_a_prefill_without_a_rendezvous_is_none() -> None:
    prefills = [Fake("p", leg=Leg.PREFILL), Fake("q", leg=Leg.PREFILL, bootstrap=("h", 1))]
    assert names(candidates(prefills)) == ["q"]
    assert candidates(prefills).find("p") is None


def test_ranked_workers_are_looked_at_up_to_the_first_that_nothing_speaks_against() -> None:
    ranked = Ranked([Fake(f"w{number}", more=number // 3) for number in range(12)])
    found = candidates(ranked, reserved=["w0"])
    assert names(found.leading(generate())) == ["w0", "w1"]
    assert ranked.looked_at == ["w0", "w1"]


def test_ranked_workers_end_at_the_first_without_room() -> None:
    ranked = Ranked([Fake("a"), Fake("b", more=4), Fake("c", more=4), Fake("d", more=4)])
    assert names(candidates(ranked)) == ["a"]
    assert ranked.looked_at == ["a", "b"]


def test_a_candidate_leads_to_its_worker() -> None:
    found = candidates(FOUR)
    load = found.find("d")
    assert load is not None
    assert found.worker(load) is FOUR[3]
