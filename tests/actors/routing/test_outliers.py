"""A worker that keeps failing is ejected, probed by one request at a time, and a share of a leg is never ejected."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio
from attrs import Factory, define
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from actors.routing.outliers import Ejection, OutlierDetector, Suspect
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.errors import BadRequest, DeadlineExceeded, EngineRefused, HandOffFailed, InternalError, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from supervisor.node import router_child
from supervisor.telemetry.registry import Registry
from tests.rig.calls import AnyAnswer
from tests.rig.router import Fake, FakePool, Play, RouterRig, ask, check_whole, generate, met_at, prefill_info, routed
from tests.system.simulator import simulate

LIMITS = Ejection(failures_max=3, window=10, rate_max=0.5, ejected_s=10, ejected_max_s=60, share_max=0.5)


def fail(outliers: OutlierDetector, name: str = "a", times: int = 1, now: float = 0.0, peers: int = 4) -> list[bool]:
    return [outliers.failed(Suspect(name, "both", peers), "internal", LIMITS, now) for _ in range(times)]


# The policy -------------------------------------------------------------------------------


def test_a_worker_is_ejected_for_a_while_after_failures_max_in_a_row() -> None:
    outliers = OutlierDetector()
    assert fail(outliers, times=3) == [False, False, True]
    assert outliers.avoided("a", 9.9)
    assert not outliers.avoided("a", 10)
    assert not outliers.avoided("b", 0)
    assert [(each.name, each.why, each.for_s) for each in outliers.ejected(4)] == [("a", "internal", 6)]


def test_a_pair_is_avoided_for_a_while_after_one_failure_and_no_longer_once_it_has_answered() -> None:
    outliers = OutlierDetector()
    outliers.avoid("a+b", 5.0, 2.0)
    assert outliers.avoided("a+b", 4.9)
    assert outliers.next_probe_at(2.0) == 5.0
    assert not outliers.avoided("a+b", 5.0)
    assert list(outliers.ejected(3.0)) == []
    outliers.avoid("a+c", 9.0, 6.0)
    assert len(outliers) == 1, "what is over is forgotten"
    outliers.answered("a+c", LIMITS, 7.0)
    assert not outliers.avoided("a+c", 7.0)
    assert not outliers


def test_a_rate_of_failures_ejects_a_worker_as_well() -> None:
    outliers = OutlierDetector()
    for _ in range(4):
        fail(outliers)
        outliers.answered("a", LIMITS, 0)
    assert not outliers
    fail(outliers, times=2)
    assert outliers, "six of ten"


def test_one_request_at_a_time_probes_whatever_others_end_or_fail() -> None:
    outliers = OutlierDetector()
    fail(outliers, times=3)
    assert outliers.begin_probe("a", "first")
    assert outliers.begin_probe("a", "where there is no other worker"), "a request fails on one that must be probed"
    outliers.end_probe("a", "where there is no other worker")
    assert outliers.avoided("a", 10), "the first one still probes it"
    assert fail(outliers, now=11) == [True]
    assert outliers.avoided("a", 1_000), "the first one still"
    outliers.end_probe("a", "first")
    assert not outliers.avoided("a", 1_000)


def test_an_answer_to_a_request_from_before_the_ejection_does_not_count() -> None:
    outliers = OutlierDetector()
    fail(outliers, times=3)
    assert fail(outliers, now=5) == [False]
    assert not outliers.answered("a", LIMITS, 5)
    assert outliers.avoided("a", 9)


def test_each_ejection_is_twice_as_long_up_to_a_limit_until_a_quiet_time() -> None:
    outliers, now, times = OutlierDetector(), 0.0, []
    fail(outliers, times=3)
    for _ in range(5):
        (worker,) = outliers.ejected(now)
        times.append(worker.for_s)
        now += worker.for_s
        assert fail(outliers, now=now) == [True]
    assert times == [10, 20, 40, 60, 60]
    outliers.answered("a", LIMITS, now + 60)
    fail(outliers, times=3, now=now + 130)
    assert [each.for_s for each in outliers.ejected(now + 130)] == [10]


def test_a_worker_that_is_gone_is_forgotten() -> None:
    outliers = OutlierDetector()
    fail(outliers, times=3)
    outliers.retain(lambda name: name != "a")
    assert not outliers


events = st.tuples(st.sampled_from("abcd"), st.sampled_from(["fails", "answers", "try", "tried"]), st.floats(0, 30))


@given(st.lists(events, max_size=80), st.floats(0, 1))
def test_whatever_happens_a_share_stays_and_every_ejected_worker_can_return(steps: list[Any], share: float) -> None:
    outliers, now = OutlierDetector(), 0.0
    limits = Ejection(3, 10, 0.5, 10, 60, share)
    for name, what, after_s in steps:
        now += after_s
        match what:
            case "fails":
                outliers.failed(Suspect(name, "both", 4), "internal", limits, now)
            case "answers":
                outliers.answered(name, limits, now)
            case "try":
                if not outliers.avoided(name, now):
                    outliers.begin_probe(name, name)
            case "tried":
                outliers.end_probe(name, name)
        out = list(outliers.ejected(now))
        assert len(out) <= share * 4
        assert all(0 <= each.for_s <= 60 for each in out)
    for each in list(outliers.ejected(now)):
        outliers.end_probe(each.name, each.name)
        assert not outliers.avoided(each.name, now + 60)
        assert outliers.answered(each.name, limits, now + 60)
    assert not outliers


hand_offs = st.tuples(st.sampled_from("pqr"), st.sampled_from("def"), st.sampled_from(["fails", "answers"]))


@given(st.lists(st.tuples(hand_offs, st.floats(0, 30)), max_size=80), st.floats(0, 1))
def test_whatever_hand_offs_fail_a_share_of_each_leg_stays_and_the_others_can_return(
    steps: list[Any], share: float
) -> None:
    outliers, now, limits = OutlierDetector(), 0.0, Ejection(3, 10, 0.5, 10, 60, share)
    for (prefill, decode, what), after_s in steps:
        now += after_s
        pair = f"{prefill}+{decode}"
        if what == "fails":
            both = Suspect(prefill, "prefill", 3), Suspect(decode, "decode", 3)
            ejected_name = outliers.failed_pair(Suspect(pair, "pair", 9), both, "cut", limits, now)
            assert ejected_name in {None, prefill, decode, pair}
        else:
            for each in (prefill, decode, pair):
                outliers.answered(each, limits, now)
        out = [each.name for each in outliers.ejected(now)]
        for kind in ("pqr", "def"):
            assert sum(each in kind for each in out) <= share * 3
        assert sum("+" in each for each in out) <= share * 9
    for each in list(outliers.ejected(now)):
        assert not outliers.avoided(each.name, now + 60)
        assert outliers.answered(each.name, limits, now + 60)
    assert not outliers


# Behind a router --------------------------------------------------------------------------


async def many(rig: RouterRig, number: int, **options: Any) -> list[str]:
    """Ask ten times a second; return what each request that failed has failed with."""
    failed: list[str] = []

    async def ask_one(name: str) -> None:
        try:
            wanted = generate(name, **options)
            check_whole(await ask(rig, wanted), wanted)
        except RequestError as error:
            failed.append(error.code)

    async with trio.open_nursery() as clients:
        for index in range(number):
            clients.start_soon(ask_one, str(index))
            await trio.sleep(0.1)
    return failed


def four(error: RequestError) -> list[Fake]:
    return [Fake("bad", otherwise=Play(error, 0), slots=64), *(Fake(name, slots=64) for name in "cde")]


@define(eq=False)
class Cut(Fake):
    """A decode to which some prefills hand nothing over."""

    cut: tuple[str, ...] = ("p0",)
    late_s: float = 0.0  # until it fails

    async def _play(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        if met_at(request).address.decode() in self.cut:
            await trio.sleep(self.late_s)
            play = Play(HandOffFailed("cut"), 0)
        await super()._play(request, play, answer, scope)


def pairs(prefills: int, decodes: int, **fields: Any) -> list[Fake]:
    """Return prefills p0, p1, ... and decodes d0, d1, ..., which have these fields."""
    return [
        *(Fake(f"p{n}", leg=Leg.PREFILL, slots=64, info=prefill_info(f"p{n}".encode())) for n in range(prefills)),
        *(Cut(f"d{n}", leg=Leg.DECODE, slots=64, **fields) for n in range(decodes)),
    ]


def ejected(rig: RouterRig) -> list[str]:
    return [worker.name for worker in rig.routing.outliers.ejected(trio.current_time())]


@pytest.mark.parametrize("error", [InternalError("a bug"), DeadlineExceeded("late")])
async def test_a_worker_that_fails_at_once_is_no_black_hole(error: RequestError, autojump_clock: MockClock) -> None:
    async with routed(*four(error)) as rig:
        failed = await many(rig, 200)
        assert len(failed) <= 5 + 3
        assert len(rig.worker("bad").asked) <= 5 + 3
        assert ejected(rig) == ["bad"]


async def test_a_request_refused_by_one_engine_is_answered_by_another_and_counts_against_it(
    autojump_clock: MockClock,
) -> None:
    async with routed(*four(EngineRefused("no"))) as rig:
        assert await many(rig, 200) == []
        assert len(rig.worker("bad").asked) <= 25, "those of the first second, before another had begun to answer"


async def test_a_clients_own_mistakes_eject_no_worker(autojump_clock: MockClock) -> None:
    for error in (EngineRefused("no"), BadRequest("no")):
        workers = [Fake(name, otherwise=Play(error, 0), slots=64) for name in "abcd"]
        async with routed(*workers) as rig:
            assert len(await many(rig, 50)) == 50
            assert not rig.routing.outliers
            assert sum(len(each.asked) for each in workers) <= 100


async def test_a_probe_that_fails_costs_its_request_nothing(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(ejection=Ejection(failures_max=3, ejected_s=5, ejected_max_s=5))
    async with routed(*four(InternalError("a bug")), limits=limits) as rig:
        assert len(await many(rig, 300)) <= 5, "those before it was known"
        tries = len(rig.worker("bad").asked)
        rig.worker("bad").otherwise = Play()
        await trio.sleep(6)
        assert await many(rig, 50) == []
        assert len(rig.worker("bad").asked) == tries + 1
        await trio.sleep(6)
        assert await many(rig, 50) == []
        assert len(rig.worker("bad").asked) > tries + 10
        assert not rig.routing.outliers


async def test_a_pair_that_cannot_hand_over_is_avoided_and_its_workers_are_not(autojump_clock: MockClock) -> None:
    """The way between p0 and d0 is cut; each of them reaches everybody else."""

    workers = pairs(2, 2)
    workers[3].cut = ()  # type: ignore[attr-defined]
    async with routed(*workers) as rig:
        assert await many(rig, 200) == []
        met = [met_at(each).address.decode() for each in rig.worker("d0").asked]
        assert met.count("p0") <= 5 + 10, "and those of the half second before the fifth had failed"
        assert met.count("p1") > 50
        assert ejected(rig) == ["p0+d0"]


async def test_an_ejected_pair_is_not_asked_while_the_others_are_only_busy(autojump_clock: MockClock) -> None:
    """One slot each: a request that finds the good decode busy waits for it, and does not fail on the bad one."""

    prefill = Fake("p", leg=Leg.PREFILL, slots=64, info=prefill_info(b"p"))
    bad, good = Cut("d0", leg=Leg.DECODE, slots=1, cut=("p",)), Fake("d1", leg=Leg.DECODE, slots=1)
    limits = FailoverLimits(resumes_max=20, ejection=Ejection(failures_max=1, ejected_s=3600, ejected_max_s=3600))
    async with routed(prefill, bad, good, limits=limits) as rig:
        assert await many(rig, 20) == []
        assert ejected(rig) == ["p+d0"]
        assert len(bad.asked) == 1
        assert len(good.asked) == 20


# Where answers one after the other take minutes.
FOR_LONG = FailoverLimits(ejection=Ejection(ejected_s=3600, ejected_max_s=3600))


async def one_by_one(rig: RouterRig, number: int) -> list[str]:
    """Ask for one answer after the other; return which workers and pairs are ejected then."""
    for index in range(number):
        wanted = generate(str(index))
        check_whole(await ask(rig, wanted), wanted)
    return ejected(rig)


def met(rig: RouterRig, prefill: str) -> int:
    return sum(
        met_at(request).address == prefill.encode() for number in range(8) for request in rig.worker(f"d{number}").asked
    )


@pytest.mark.parametrize("late_s", [0, 2])
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_prefill_that_fails_with_many_decodes_is_ejected_and_not_pair_by_pair(
    at_once: bool, late_s: int, autojump_clock: MockClock
) -> None:
    """Its own leg may have ended well before: it knows no more than what it has sent."""
    async with routed(*pairs(4, 8, late_s=late_s), limits=FOR_LONG) as rig:
        if at_once:
            assert await many(rig, 50) == []
            assert ejected(rig) == ["p0"]
        else:
            assert await one_by_one(rig, 20) == ["p0"]
        assert met(rig, "p0") <= 5 + (10 * (1 + late_s) if at_once else 1), "at once also those that were on the way"


@pytest.mark.parametrize("bad", ["d0", "p0"])
@pytest.mark.parametrize("told_by", [Leg.PREFILL, Leg.DECODE])
async def test_a_leg_that_lets_the_other_wait_is_ejected_whichever_reports_it(
    bad: str, told_by: Leg, autojump_clock: MockClock
) -> None:
    class Waits(Fake):
        """A leg that waits for the other one, for 60 seconds at the longest."""

        async def _play(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
            met = met_at(request)
            if self.name in bad_ones or met.address.decode() in bad_ones or met.room in rooms:
                rooms.add(met.room)
                play = Play(DeadlineExceeded("late"), 0) if self.leg is told_by else Play(tokens=0)
            await super()._play(request, play, answer, scope)

    bad_ones, rooms = {bad}, set[int]()
    prefills = [Waits(f"p{n}", leg=Leg.PREFILL, slots=64, info=prefill_info(f"p{n}".encode())) for n in range(3)]
    decodes = [Waits(f"d{n}", leg=Leg.DECODE, slots=64) for n in range(3)]
    async with routed(*decodes, *prefills, limits=FOR_LONG) as rig:
        await many(rig, 100)
        assert ejected(rig) == [bad]


# What a choice costs -----------------------------------------------------------------------


@define(eq=False)
class Ordered:
    """Workers as a router prefers them, and how often one was looked at."""

    workers: Sequence[Fake]
    leg: Leg = Leg.BOTH
    looks: Counter[Leg] = Factory(Counter)

    def of_leg(self, leg: Leg) -> Ordered:
        return Ordered([each for each in self.workers if each.leg is leg], leg, self.looks)

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[Fake]:
        for each in sorted(self.workers, key=lambda each: (each.load.busy / each.slots, each.load.tokens, each.name)):
            self.looks[self.leg] += 1
            yield each

    def get(self, name: str) -> Fake | None:
        return next((each for each in self.workers if each.name == name), None)


async def chooses(workers: Sequence[Fake], ejected_names: Sequence[str] = ()) -> tuple[Routing, Ordered]:
    """Return a routing that ranks these workers, of which some are ejected, and the ranks."""
    routing = Routing(FakePool([*workers], None), least_loaded, FailoverLimits(), lambda: 1, lambda: "", 0, frozenset())
    for name in ejected_names:
        for _ in range(5):
            routing.failed(name, HandOffFailed("cut") if "+" in name else InternalError("a bug"))
    ordered = Ordered(workers)
    routing.ranked = ordered.of_leg
    return routing, ordered


async def test_a_choice_looks_at_no_more_workers_where_one_is_ejected(autojump_clock: MockClock) -> None:
    workers = [Fake(f"w{number}", slots=8) for number in range(1000)]
    routing, ordered = await chooses(workers, ["w7"])
    assert len(routing.outliers) == 1
    routing.pool.all = []  # type: ignore[attr-defined]  # who needs them all finds nobody
    workers[7].slots = 80  # so that it would be the first
    workers[7].more = 1
    route = routing.choose(generate())
    assert route is not None
    assert route.name != "w7"
    assert ordered.looks.total() <= 3


@pytest.mark.parametrize("seed", range(200))
async def test_the_same_worker_or_pair_is_chosen_from_ranked_workers_and_others(
    seed: int, autojump_clock: MockClock
) -> None:
    rng = random.Random(seed)
    legs = rng.choice([[Leg.BOTH] * 5, [Leg.PREFILL] * 3 + [Leg.DECODE] * 4, [Leg.PREFILL, Leg.DECODE, Leg.BOTH] * 3])
    workers = [Fake(f"w{number}", leg=leg, slots=4, more=rng.randrange(5)) for number, leg in enumerate(legs)]
    for worker in workers:
        worker.info = prefill_info() if worker.leg is Leg.PREFILL and rng.random() < 0.9 else None
    names = [worker.name for worker in workers]
    pairs = [
        f"{prefill.name}+{decode.name}"
        for prefill in workers
        for decode in workers
        if (prefill.leg, decode.leg) == (Leg.PREFILL, Leg.DECODE)
    ]
    routing, ordered = await chooses(workers, rng.sample([*names, *pairs], rng.randrange(5)))
    but = rng.sample(names, rng.randrange(3))
    for _ in range(12):  # each keeps its place
        routing.ranked = ordered.of_leg
        from_ranked, routing.ranked = routing.choose(generate(), but), None
        if from_ranked is not None:
            from_ranked.end()
        from_all = routing.choose(generate(), but)
        if from_ranked is None or from_all is None:
            assert from_ranked is from_all
            break
        assert from_ranked.names == from_all.names


async def test_a_request_that_waits_is_given_to_a_worker_when_its_ejection_ends(autojump_clock: MockClock) -> None:
    limits = FailoverLimits(ejection=Ejection(failures_max=1, ejected_s=30))
    workers = [Fake("a", [Play(InternalError("a bug"), 0)], slots=1), Fake("b", slots=1)]
    async with routed(*workers, limits=limits) as rig, trio.open_nursery() as nursery:
        with pytest.raises(InternalError):
            await ask(rig, generate("0"))
        ends_at = trio.current_time() + 30
        nursery.start_soon(ask, rig, generate("1", tokens_max=100))
        await trio.sleep(1)
        nursery.start_soon(ask, rig, generate("2"))
        await trio.sleep(35)
        assert [each.id for each in rig.worker("b").asked] == ["1"]
        assert [each.id for each in rig.worker("a").asked] == ["0", "2"]
        assert rig.worker("a").times[1] == pytest.approx(ends_at, abs=0.1)


async def test_ejected_workers_are_asked_where_there_are_no_others(autojump_clock: MockClock) -> None:
    async with routed(*four(InternalError("a bug"))) as rig:
        await many(rig, 60)
        rig.pool.change(*"cde")
        rig.worker("bad").otherwise = Play()
        assert await many(rig, 10) == []


@pytest.mark.parametrize("seed", range(10))
def test_random_failures_leave_no_reservation_and_no_request_unanswered(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        errors = (InternalError, DeadlineExceeded, EngineRefused, HandOffFailed)

        def plays() -> list[Play]:
            return [rng.choice((Play(), Play(rng.choice(errors)("x"), rng.randrange(3)))) for _ in range(40)]

        legs = [Fake(f"w{n}", plays(), slots=3) for n in range(2)]
        legs += [Fake(f"p{n}", plays(), Leg.PREFILL, 3, info=prefill_info()) for n in range(3)]
        legs += [Fake(f"d{n}", plays(), Leg.DECODE, 3) for n in range(3)]
        async with routed(*legs, prefill_tokens_min=5, limits=FailoverLimits(ejection=LIMITS)) as rig:
            await many(rig, 60, prompt=range(rng.randrange(1, 9)))

    simulate(scenario, seed)


async def test_ejected_workers_are_in_the_status_and_the_metrics(autojump_clock: MockClock) -> None:
    async with routed(*four(InternalError("a bug"))) as rig:
        await many(rig, 60)
        routings = {"tiny": rig.routing}
        (entry,) = router_child.ejected(routings)
        assert (entry.model, entry.worker, entry.why) == ("tiny", "bad", "internal")
        assert 0 <= entry.for_s < 10
        registry = Registry()
        router_child.add_ejected_gauge(registry, routings)
        (family,) = registry.families()
        assert [(each.labels, each.value) for each in family.samples] == [({"model": "tiny", "worker": "bad"}, 1.0)]
