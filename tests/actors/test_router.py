"""Router: the least loaded is asked, both legs or none, and a loss is not seen by whoever asked."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
import trio
from attrs import Factory, define, evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.decode import decode
from actors.engines.simulated.costs import Costs
from actors.engines.simulated.engine import SimulatedEngine
from actors.engines.slots import Deadlines
from actors.kit.calls import Address, Answer, mailbox
from actors.kit.priority_inbox import priority_inbox
from actors.router import router
from actors.routing.failover import resumes_exactly
from actors.routing.least_loaded import least_loaded
from actors.routing.load import Load
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.cluster import Leg
from protocol.errors import (
    ActorLost,
    AskerLeft,
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineDied,
    EngineLost,
    EngineRefused,
    HandOffFailed,
    InternalError,
    LinkLost,
    NotReady,
    Overloaded,
    RequestError,
)
from protocol.messages import (
    EngineLoad,
    Finished,
    FinishReason,
    Generate,
    Grammar,
    GrammarKind,
    Logprob,
    Sampling,
    Started,
    Tokens,
    Usage,
)
from tests.rig.simulated_engines import spec
from tests.system.simulator import counting, simulate

EOS = 0
PROMPT = [5, 6, 7, 8]


def text(prompt: list[int], length: int = 1000) -> list[int]:
    """What every fake worker answers to a prompt, to its eos."""
    return [1 + (sum(prompt) * 7 + place * 13) % 89 for place in range(length)] + [EOS]


@frozen
class Play:
    """What a fake worker does when it is asked: so many tokens, a second each, and then an error, if any."""

    error: Exception | None = None
    tokens: int = 10**6
    started: bool = True
    cached: int = 0
    length: int = 1000
    at_once: bool = False  # the error comes with the last of the tokens, in the same turn


@define(eq=False)
class Fake:
    """A worker whose answers a test scripts; without a script it answers well."""

    name: str
    plays: list[Play] = Factory(list)
    leg: Leg = Leg.BOTH
    slots: int = 4
    otherwise: Play = Play()
    bootstrap: tuple[str, int] | None = None
    busy: int = 0
    more: int = 0  # requests of others
    lets_go_s: float = 0.0  # of a request that was left
    asked: list[Generate] = Factory(list)
    times: list[float] = Factory(list)
    left: list[float] = Factory(list)
    has_begun: list[str] = Factory(list)
    pool: FakePool = field(init=False)

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy + self.more, self.slots)

    def begun(self, request_id: str) -> None:
        self.has_begun.append(request_id)

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer]:
        self.busy += 1
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.asked.append(request)
            self.times.append(trio.current_time())
            answer: Answer = Answer(credit)
            scope = trio.CancelScope()
            self.pool.stage.start_soon(
                self._play, request, self.plays.pop(0) if self.plays else self.otherwise, answer, scope
            )
            try:
                yield answer
            finally:
                scope.cancel()
                if not answer.over.is_set():
                    self.left.append(trio.current_time())
                answer.abandon()
        finally:
            self.busy -= 1
            self.pool.change()

    async def _play(self, request: Generate, play: Play, answer: Answer, scope: trio.CancelScope) -> None:
        prefill = self.leg is Leg.PREFILL
        wanted, said = request.sampling, request.said
        whole = text(request.tokens[: len(request.tokens) - said], play.length)[said:]
        ends = {*wanted.stop_token_ids} if wanted.ignore_eos else {EOS, *wanted.stop_token_ids}
        most = 1 if prefill else wanted.tokens_max
        with scope:
            for number, token in enumerate(whole[: play.tokens], start=1):
                await trio.sleep(1)
                if number == 1 and play.started:
                    answer.put(Started(play.cached), 0)
                answer.put(Tokens([token], () if request.logprobs is None else (Logprob(-token / 8),)))
                stops = token in ends and number > wanted.tokens_min
                if play.error is not None and play.tokens == number and play.at_once:
                    answer.fail(play.error)
                elif stops or number == most:
                    usage = Usage(len(request.tokens), number, play.cached)
                    reason = FinishReason.STOP if stops else FinishReason.LENGTH
                    answer.end(Finished(reason, usage, token if stops else None))
                if answer.over.is_set():
                    return
            await trio.sleep(0.5)
            if play.error is not None:
                answer.fail(play.error)
        if scope.cancelled_caught:
            await trio.sleep(self.lets_go_s)
            answer.fail(AskerLeft("the asker left"))


@define(eq=False)
class FakePool:
    """Workers that a test names; `gone` are those that cannot be asked."""

    all: list
    stage: trio.Nursery
    gone: set[str] = Factory(set)
    has: str | None = None  # which weights
    changed: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)

    def workers(self) -> list:
        return [worker for worker in self.all if worker.name not in self.gone]

    def expected(self) -> dict:
        return {worker.name: worker.leg for worker in self.all}

    def weights(self) -> str | None:
        return self.has

    async def wait_changed(self) -> None:
        await self.changed.park()

    def wake(self) -> None:
        self.changed.unpark_all()

    def change(self, *gone: str) -> None:
        self.gone = set(gone) if gone else self.gone
        self.changed.unpark_all()

    def back(self) -> None:
        self.gone = set()
        self.changed.unpark_all()


@frozen
class World:
    """A router over workers."""

    address: Address
    pool: FakePool
    routing: Routing

    def worker(self, name: str):
        return next(worker for worker in self.pool.all if worker.name == name)

    def check_at_rest(self) -> None:
        assert [worker.busy for worker in self.pool.all] == [0] * len(self.pool.all)
        assert not self.routing._reservations.requests
        assert not self.routing._reservations.pending


@asynccontextmanager
async def routed(
    *workers, inbox_size: int = 64, limits: FailoverLimits | None = None, prefill_tokens_min: int = 0
) -> AsyncIterator[World]:
    ids, rng = count(1), random.Random(0)
    address, inbox = mailbox(inbox_size)
    async with trio.open_nursery() as stage:
        pool = FakePool(list(workers), stage)
        for worker in workers:
            worker.pool = pool
        routing = Routing(
            pool=pool,
            policy=least_loaded,
            limits=limits or FailoverLimits(),
            new_room=lambda: rng.getrandbits(63),
            new_id=lambda: f"new {next(ids)}",
            prefill_tokens_min=prefill_tokens_min,
            ends=frozenset({EOS}),
        )
        await stage.start(router, inbox, routing)
        world = World(address, pool, routing)
        yield world
        await wait_all_tasks_blocked()
        world.check_at_rest()
        stage.cancel_scope.cancel()


def generate(name="a", tokens_max: int = 6, prompt=PROMPT, logprobs: int | None = None, **sampling) -> Generate:
    return Generate(name, list(prompt), Sampling(tokens_max, **sampling), logprobs)


@frozen
class Got:
    """What whoever asked has seen."""

    replies: list
    finished: Finished

    @property
    def ids(self) -> list[int]:
        return [token for reply in self.replies if isinstance(reply, Tokens) for token in reply.ids]


async def ask(world: World, request: Generate, into: list | None = None) -> Got:
    replies = [] if into is None else into
    async with world.address.ask(request, request.sampling.tokens_max) as answer:
        finished = await answer.relay(replies.append)
    assert isinstance(finished, Finished)
    return Got(replies, finished)


def check_whole(got: Got, request: Generate, length: int = 1000, cached: int = 0) -> None:
    """What was got is what one worker alone would have answered."""
    expected = text(request.tokens, length)[: request.sampling.tokens_max]
    assert got.ids == expected
    assert [type(reply) for reply in got.replies] == [Started] + [Tokens] * len(expected)
    assert got.replies[0] == Started(cached)
    assert got.finished.usage == Usage(len(request.tokens), len(expected), cached)
    stopped = expected[-1] == EOS
    assert got.finished.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert got.finished.matched == (EOS if stopped else None)


def pair(**decode_or_prefill) -> tuple[Fake, Fake]:
    """A prefill and a decode, each with its script."""
    prefill = Fake("p", leg=Leg.PREFILL, bootstrap=("host", 7), plays=decode_or_prefill.get("prefill", []))
    return prefill, Fake("d", leg=Leg.DECODE, plays=decode_or_prefill.get("decode", []))


# The policy -------------------------------------------------------------------------------

names, tokens_held = st.text("abc", max_size=3), st.integers(0, 99)
every_load = st.lists(st.builds(Load, names, st.integers(0, 12), st.integers(0, 8), tokens_held), max_size=9)
loads = every_load.map(lambda every: [load for load in every if not load.full]).filter(bool)


@given(loads)
def test_the_least_loaded_is_chosen(every: list[Load]) -> None:
    chosen = every[least_loaded(generate(), every)]
    assert all(chosen.busy * load.slots <= load.busy * chosen.slots for load in every)
    same = [load for load in every if load.busy * chosen.slots == chosen.busy * load.slots]
    assert chosen.tokens == min(load.tokens for load in same)


@given(every_load)
def test_a_policy_is_asked_about_workers_with_room_alone(every: list[Load]) -> None:
    seen: list[Load] = []

    def policy(_: Generate, loads: Sequence[Load]) -> int:
        seen.extend(loads)
        return len(loads) - 1

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


memories = st.builds(
    Load,
    st.text("abc", max_size=3),
    st.integers(0, 3),
    st.integers(1, 4),
    kv_tokens=st.integers(0, 9),
    kv_tokens_max=st.integers(0, 9),
)


@given(st.lists(memories, min_size=1, max_size=6), st.integers(0, 9))
def test_one_whose_memory_has_room_is_chosen(every, tokens: int) -> None:
    request = generate(prompt=[], tokens_max=tokens)
    chosen = every[least_loaded(request, every)]
    assert chosen.fits(request) == any(load.fits(request) for load in every)


def test_a_prefill_holds_the_prompt_of_a_request_and_others_all_that_it_may_come_to() -> None:
    request = generate(prompt=[1] * 6, tokens_max=3)
    held = {leg: Load("a", 0, 1, leg=leg).tokens_of(request) for leg in Leg}
    assert held == {Leg.PREFILL: 6, Leg.DECODE: 9, Leg.BOTH: 9}
    assert [Load("a", 0, 1, kv_tokens_max=8, leg=leg).fits(request) for leg in (Leg.PREFILL, Leg.BOTH)] == [True, False]


def test_a_worker_that_does_not_tell_of_its_memory_has_room() -> None:
    assert Load("a", 0, 1).fits(generate(tokens_max=10**9))
    assert not Load("a", 1, 1).overcommitted
    assert Load("a", 2, 1).overcommitted
    assert Load("a", 1, 4, kv_tokens=9, kv_tokens_max=8).overcommitted


@given(loads, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order(every: list[Load], rng: random.Random) -> None:
    mixed = rng.sample(every, len(every))
    assert every[least_loaded(generate(), every)] == mixed[least_loaded(generate(), mixed)]


@given(loads, st.data())
def test_who_is_busier_than_the_chosen_changes_nothing(every: list[Load], data: st.DataObject) -> None:
    at = least_loaded(generate(), every)
    other = data.draw(st.integers(0, len(every) - 1))
    busier = [*every]
    if other != at:
        busier[other] = evolve(every[other], busy=every[other].busy + 1)
    assert least_loaded(generate(), busier) == at


# One worker -------------------------------------------------------------------------------


async def test_an_answer_passes_as_it_is(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", [Play(cached=2)])) as world:
        wanted = generate(logprobs=0)
        got = await ask(world, wanted)
        check_whole(got, wanted, cached=2)
        assert got.replies[1].logprobs == (Logprob(-got.ids[0] / 8),)
        assert world.worker("w").asked == [wanted], "it is passed on as it came"
        assert trio.current_time() == 6


async def test_the_least_loaded_is_asked_and_of_equals_always_the_same(autojump_clock: MockClock) -> None:
    async with routed(Fake("b"), Fake("a"), Fake("c", slots=8)) as world, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, world, generate(str(number)))
            await trio.sleep(0.1)
        names = {w.name: [each.id for each in w.asked] for w in world.pool.all}
        assert names == {"a": ["0", "4"], "b": ["1", "5"], "c": ["2", "3"]}


async def test_requests_of_one_instant_are_spread_over_all(autojump_clock: MockClock) -> None:
    legs = [Fake(f"p{n}", leg=Leg.PREFILL, bootstrap=("h", n)) for n in range(3)]
    legs += [Fake(f"d{n}", leg=Leg.DECODE) for n in range(3)]
    async with routed(*legs) as world, trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(ask, world, generate(str(number)))
        await trio.sleep(0.5)
        assert [(w.busy, w.slots) for w in world.pool.all] == [(4, 4)] * 6


async def test_while_all_are_full_requests_wait_in_the_inbox_and_go_on_in_their_order(
    autojump_clock: MockClock,
) -> None:
    async with routed(Fake("w", slots=2)) as world, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, world, generate(str(number)))
            await trio.sleep(0.01)
        worker = world.worker("w")
        assert [each.id for each in worker.asked] == ["0", "1"]
        assert world.address.inbox.statistics().current_buffer_used == 4  # type: ignore[attr-defined]
        await trio.sleep(100)
        assert [each.id for each in worker.asked] == ["0", "1", "2", "3", "4", "5"]
        assert worker.times == pytest.approx([0, 0.01, 6, 6.01, 12, 12.01])


async def test_never_more_than_have_room_are_asked(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", slots=2), Fake("b", slots=1)) as world:
        most = {"a": 0, "b": 0}

        async def watch() -> None:
            while True:
                for worker in world.pool.all:
                    most[worker.name] = max(most[worker.name], worker.busy)
                await trio.sleep(0.25)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as clients:
                for number in range(20):
                    clients.start_soon(ask, world, generate(str(number), tokens_max=1 + number % 5))
            nursery.cancel_scope.cancel()
        assert most == {"a": 2, "b": 1}


async def test_without_any_worker_a_request_waits_for_one(autojump_clock: MockClock) -> None:
    async with routed(Fake("w")) as world, trio.open_nursery() as nursery:
        world.pool.change("w")
        nursery.start_soon(ask, world, generate())
        await trio.sleep(50)
        assert not world.worker("w").asked
        world.pool.back()
        await trio.sleep(1)
        assert world.worker("w").times == [50]


async def test_one_who_leaves_while_waiting_is_not_asked_for(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=1)) as world, trio.open_nursery() as nursery:
        nursery.start_soon(ask, world, generate("first"))
        await wait_all_tasks_blocked()
        with trio.move_on_after(2):
            await ask(world, generate("gone"))
        await ask(world, generate("last"))
        assert [each.id for each in world.worker("w").asked] == ["first", "last"]
        assert trio.current_time() == 12


async def test_a_request_that_no_worker_will_take_holds_nobody_up_in_leaving(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", [Play(EngineLost("x"), 0)])) as world:
        async with world.address.ask(generate(), 6) as answer:
            await trio.sleep(0.5)
            world.pool.change("w")
            await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert answer.over.is_set()
        assert trio.current_time() == 1.5


# A pair -----------------------------------------------------------------------------------


async def test_both_legs_are_asked_at_once_for_the_same(autojump_clock: MockClock) -> None:
    async with routed(*pair()) as world:
        wanted = generate()
        check_whole(await ask(world, wanted), wanted)
        (prefill,), (decode_) = world.worker("p").asked, world.worker("d").asked[0]
        assert prefill == decode_
        assert (prefill.tokens, prefill.id, prefill.rendezvous.host, prefill.rendezvous.port) == (
            PROMPT,
            "a",
            "host",
            7,
        )
        assert world.worker("p").times == world.worker("d").times == [0]


async def test_every_request_has_a_room_of_its_own(autojump_clock: MockClock) -> None:
    async with routed(*pair()) as world:
        for _ in range(30):
            await ask(world, generate(tokens_max=1))
        rooms = [each.rendezvous.room for each in world.worker("p").asked]
        assert rooms == [each.rendezvous.room for each in world.worker("d").asked]
        assert len(set(rooms)) == 30
        assert all(0 <= room < 2**63 for room in rooms)
        assert max(rooms) > 2**60


async def test_what_the_prefill_had_in_its_cache_is_what_was_cached(autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(cached=3)])) as world:
        got = await ask(world, generate())
        assert got.finished.usage == Usage(4, 6, 3)


@pytest.mark.parametrize(
    ("prompt", "whole", "expected"), [(9, True, "w"), (10, True, "p d"), (9, False, "p d"), (10, False, "p d")]
)
async def test_a_short_prompt_goes_to_one_that_computes_both_where_there_is_one(
    prompt: int, whole: bool, expected: str, autojump_clock: MockClock
) -> None:
    workers = [*pair(), *([Fake("w")] if whole else [])]
    async with routed(*workers, prefill_tokens_min=10) as world:
        await ask(world, generate(prompt=range(prompt)))
        assert " ".join(each.name for each in world.pool.all if each.asked) == expected


@pytest.mark.parametrize("missing", ["p", "d"])
async def test_a_leg_alone_is_never_asked(missing: str, autojump_clock: MockClock) -> None:
    async with routed(*pair()) as world:
        world.pool.change(missing)
        with trio.move_on_after(20):
            await ask(world, generate())
        assert not any(each.asked for each in world.pool.all)
        world.pool.back()
        await ask(world, generate())


async def test_a_prefill_that_has_not_said_where_it_is_met_is_not_asked(autojump_clock: MockClock) -> None:
    async with routed(*pair(), Fake("new", leg=Leg.PREFILL)) as world:
        for _ in range(3):
            await ask(world, generate())
        assert not world.worker("new").asked
        assert [each.id for each in world.worker("d").asked] == ["a"] * 3, "nothing was lost on the way"


REFUSED = BadRequest("no")


@pytest.mark.parametrize(("failing", "tokens"), [("prefill", 0), ("decode", 0), ("decode", 3)])
async def test_the_failure_of_a_leg_ends_the_other_in_the_same_instant(
    failing: str, tokens: int, autojump_clock: MockClock
) -> None:
    stuck = Play(None, 3)  # says some tokens, and then nothing for ever
    plays = {"prefill": [stuck], "decode": [stuck]} | {failing: [Play(REFUSED, tokens)]}
    prefill, decoder = pair(**plays)
    async with routed(prefill, decoder) as world:
        with pytest.raises(BadRequest, match="no"):
            await ask(world, generate())
        at = tokens + 0.5
        assert trio.current_time() == at
        other = decoder if failing == "prefill" else prefill
        ended = failing == "decode" and tokens  # the prefill had done its part
        assert other.left == ([] if ended else [at])


class Late(Fake):
    """A prefill that says nothing, and fails when the decode is in the middle of its answer."""

    async def _play(self, request: Generate, play: Play, answer: Answer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(3.25)
            answer.fail(EngineRefused("late"))


async def test_a_prefill_that_fails_in_the_middle_of_the_stream_ends_the_decode(autojump_clock: MockClock) -> None:
    _, decoder = pair()
    async with routed(Late("p", leg=Leg.PREFILL, bootstrap=("h", 1)), decoder) as world:
        got: list = []
        with pytest.raises(EngineRefused, match="late"):
            await ask(world, generate(tokens_max=60), got)
        assert len(got) == 4
        assert decoder.left == [3.25] == [trio.current_time()]


@pytest.mark.parametrize("after_s", [0, 0.5, 1.5, 4.5])
async def test_leaving_ends_both(after_s: float, autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(None, 0)])) as world:
        with trio.move_on_after(after_s):
            await ask(world, generate())
        await wait_all_tasks_blocked()
        assert trio.current_time() == after_s
        assert world.worker("p").left == world.worker("d").left == ([after_s] if after_s else [])


async def test_once_the_decode_has_ended_nobody_waits_for_the_prefill(autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(None, 0)])) as world:
        check_whole(await ask(world, generate()), generate())
        assert trio.current_time() == 6
        assert world.worker("p").left == [6]


async def test_of_two_errors_the_one_that_is_not_for_others_to_mend_is_told(autojump_clock: MockClock) -> None:
    plays = {"prefill": [Play(HandOffFailed("the decode went"), 0)], "decode": [Play(EngineRefused("the cause"), 0)]}
    async with routed(*pair(**plays)) as world:
        with pytest.raises(EngineRefused, match="the cause"):
            await ask(world, generate())


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_pair_whose_leg_is_lost_is_asked_again_with_another_in_its_place_in_another_room(
    failing: str, autojump_clock: MockClock
) -> None:
    legs = pair(**{failing: [Play(EngineLost("gone"), 0)]})
    others = Fake("p2", leg=Leg.PREFILL, bootstrap=("h", 2), more=2), Fake("d2", leg=Leg.DECODE, more=2)
    async with routed(*legs, *others) as world:
        wanted = generate()
        check_whole(await ask(world, wanted), wanted)
        kept, lost = ("d", "p") if failing == "prefill" else ("p", "d")
        assert [len(world.worker(name).asked) for name in (kept, lost, f"{kept}2", f"{lost}2")] == [2, 1, 0, 1]
        first, second = world.worker(kept).asked
        assert first.rendezvous.room != second.rendezvous.room
        assert (second.id, second.said) == ("new 1", 0)


async def test_after_a_failed_hand_off_both_are_avoided(autojump_clock: MockClock) -> None:
    legs = pair(decode=[Play(HandOffFailed("x"), 0)])
    others = Fake("p2", leg=Leg.PREFILL, bootstrap=("h", 2), more=2), Fake("d2", leg=Leg.DECODE, more=2)
    async with routed(*legs, *others) as world:
        await ask(world, generate())
        assert [len(each.asked) for each in world.pool.all] == [1, 1, 1, 1]


async def test_the_same_pair_is_asked_again_where_there_is_no_other(autojump_clock: MockClock) -> None:
    async with routed(*pair(decode=[Play(HandOffFailed("x"), 0)]), limits=FailoverLimits(pause_s=0.25)) as world:
        check_whole(await ask(world, generate()), generate())
        assert world.worker("p").times == world.worker("d").times == [0, 0.75]


# Elsewhere --------------------------------------------------------------------------------

LOSSES = [ActorLost, Draining, EngineLost, HandOffFailed, LinkLost, NotReady, Overloaded]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", range(7))
@pytest.mark.parametrize("length", [1000, 5])
async def test_a_loss_at_any_token_is_not_seen(
    loss: type[RequestError], tokens: int, length: int, autojump_clock: MockClock
) -> None:
    lost = Play(loss("gone"), tokens, cached=3, length=length, at_once=tokens > 0)
    async with routed(Fake("a", [lost]), Fake("b", otherwise=Play(cached=4, length=length))) as world:
        wanted = generate(tokens_max=6, tokens_min=2, logprobs=0)
        got = await ask(world, wanted)
        check_whole(got, wanted, length, cached=3 if tokens else 4)
        assert [reply.logprobs[0].logprob for reply in got.replies[1:]] == [-token / 8 for token in got.ids]
        asked = world.worker("b").asked
        assert len(asked) == (tokens < 6), "nobody is asked for what is whole"
        if asked:
            sampling = evolve(wanted.sampling, tokens_max=6 - tokens, tokens_min=max(0, 2 - tokens))
            tokens_ = PROMPT + got.ids[:tokens]
            assert asked == [evolve(wanted, id="new 1", tokens=tokens_, said=tokens, sampling=sampling)]
            assert world.worker("b").times == [tokens or 0.5]


async def test_the_word_that_it_was_the_last_token_may_be_lost_even_with_no_resume_left(
    autojump_clock: MockClock,
) -> None:
    lost = Play(EngineLost("gone"), 6, at_once=True)
    async with routed(Fake("a", [lost]), limits=FailoverLimits(resumes_max=0)) as world:
        grammar = Grammar(GrammarKind.REGEX, "a*")
        check_whole(await ask(world, generate(grammar=grammar)), generate())


async def test_a_stop_token_ends_whole_too(autojump_clock: MockClock) -> None:
    stop = text(PROMPT)[2]
    async with routed(Fake("a", [Play(LinkLost("gone"), 3, at_once=True)])) as world:
        got = await ask(world, generate(stop_token_ids=(stop,)))
        assert got.finished == Finished(FinishReason.STOP, Usage(4, 3), stop)
        assert got.ids == text(PROMPT)[:3]


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"tokens_min": 4}])
async def test_a_token_that_ends_nothing_is_gone_on_from(
    sampling: Mapping[str, int], autojump_clock: MockClock
) -> None:
    lost, well = Play(EngineLost("gone"), 4, length=3, at_once=True), Play(length=8)
    async with routed(Fake("a", [lost]), Fake("b", otherwise=well)) as world:
        got = await ask(world, generate(**sampling))
        assert got.ids[:4] == text(PROMPT, 3)
        assert len(got.ids) == 6


@pytest.mark.parametrize("error", [BadRequest, ContextTooLong, DeadlineExceeded, InternalError])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_what_is_no_loss_is_passed_as_it_is(
    error: type[BadRequest | ContextTooLong | DeadlineExceeded | InternalError], tokens: int, autojump_clock: MockClock
) -> None:
    made = error("because", param="x")
    async with routed(Fake("a", [Play(made, tokens)]), Fake("b")) as world:
        with pytest.raises(error) as caught:
            await ask(world, generate())
        assert caught.value is made
        assert not world.worker("b").asked


@pytest.mark.parametrize("loss", [EngineLost, LinkLost])
@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": Grammar(GrammarKind.REGEX, "a*")},
        {"grammar": Grammar(GrammarKind.JSON_SCHEMA, "{}"), "repetition_penalty": 1.1},
    ],
)
async def test_what_cannot_be_resumed_exactly_ends_in_the_truth_but_may_begin_elsewhere(
    sampling: dict[str, Any], loss: type[EngineLost | LinkLost], autojump_clock: MockClock
) -> None:
    assert not resumes_exactly(Sampling(1, **sampling))
    plays = [Play(loss("first"), 0), Play(loss("then"), 2)]
    async with routed(Fake("a", plays[:1]), Fake("b", plays[1:], more=2), Fake("c", more=3)) as world:
        got: list = []
        with pytest.raises(loss, match="then"):
            await ask(world, generate(**sampling), got)
        assert len(got) == 3
        assert not world.worker("c").asked


@pytest.mark.parametrize(("most", "whole"), [(0, False), (1, False), (2, True)])
async def test_a_request_goes_on_as_often_as_it_may(most: int, whole: bool, autojump_clock: MockClock) -> None:
    workers = [Fake("a", [Play(EngineLost("1"), 2)]), Fake("b", [Play(LinkLost("2"), 1)], more=1), Fake("c", more=2)]
    async with routed(*workers, limits=FailoverLimits(resumes_max=most)) as world:
        if whole:
            check_whole(await ask(world, generate()), generate())
            assert [each.id for worker in workers for each in worker.asked] == ["a", "new 1", "new 2"]
            assert world.worker("c").asked[0].said == 3
        else:
            with pytest.raises((EngineLost, LinkLost), match=str(most + 1)):
                await ask(world, generate())


@pytest.mark.parametrize(("most", "whole"), [(3, True), (2, False)])
async def test_a_request_goes_on_with_as_many_tokens_as_it_may(
    most: int, whole: bool, autojump_clock: MockClock
) -> None:
    limits = FailoverLimits(resume_tokens_max=most)
    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b"), limits=limits) as world:
        if whole:
            check_whole(await ask(world, generate()), generate())
        else:
            with pytest.raises(EngineLost, match="gone"):
                await ask(world, generate())


@pytest.mark.parametrize(("back_s", "whole"), [(9, True), (11, False)])
async def test_a_request_waits_as_long_for_another_worker_as_it_may(
    back_s: int, whole: bool, autojump_clock: MockClock
) -> None:
    async with routed(Fake("a", [Play(LinkLost("gone"), 3)])) as world, trio.open_nursery() as nursery:

        async def come_and_go() -> None:
            await trio.sleep(1)
            world.pool.change("a")
            await trio.sleep(2.5 + back_s)
            world.pool.back()

        nursery.start_soon(come_and_go)
        if whole:
            check_whole(await ask(world, generate()), generate())
            assert world.worker("a").times == [0, 12.5]
        else:
            with pytest.raises(LinkLost, match="gone"):
                await ask(world, generate())
            assert trio.current_time() == 13.5


async def test_a_worker_is_lost_twice_and_asked_again_after_a_pause_where_there_is_no_other(
    autojump_clock: MockClock,
) -> None:
    plays = [Play(LinkLost("1"), 2, cached=1), Play(LinkLost("2"), 2, cached=3)]
    async with routed(Fake("a", plays), limits=FailoverLimits(pause_s=0.5)) as world:
        check_whole(await ask(world, generate()), generate(), cached=1)
        assert world.worker("a").times == [0, 3, 6]
        assert [each.id for each in world.worker("a").asked] == ["a", "new 1", "new 2"]
        assert [each.said for each in world.worker("a").asked] == [0, 2, 4]


async def test_a_request_whose_engine_died_is_not_given_to_that_engine_again(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)])) as world:
        with pytest.raises(EngineLost, match="1"):
            await ask(world, generate())
        assert (len(world.worker("a").asked), trio.current_time()) == (1, 2.5), "nobody is worth waiting for"


@pytest.mark.parametrize(("back_s", "whole"), [(9, True), (11, False)])
async def test_a_request_whose_engine_died_waits_for_another_that_is_down_for_a_moment(
    back_s: int, whole: bool, autojump_clock: MockClock
) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)]), Fake("b")) as world, trio.open_nursery() as nursery:
        world.pool.change("b")

        async def come_back() -> None:
            await trio.sleep(2.5 + back_s)
            world.pool.back()

        nursery.start_soon(come_back)
        if whole:
            check_whole(await ask(world, generate()), generate())
            assert world.worker("b").times == [2.5 + back_s]
        else:
            with pytest.raises(EngineLost, match="1"):
                await ask(world, generate())
            assert trio.current_time() == 12.5


@pytest.mark.parametrize(("leg", "waits"), [(Leg.PREFILL, True), (Leg.BOTH, True), (Leg.DECODE, False)])
async def test_a_pair_whose_prefill_died_waits_for_another_or_for_a_worker_of_both_legs(
    leg: Leg, waits: bool, autojump_clock: MockClock
) -> None:
    prefill, decode_ = pair(prefill=[Play(EngineLost("p"), 0)])
    async with routed(prefill, decode_, Fake("down", leg=leg, bootstrap=("h", 1))) as world:
        world.pool.gone = {"down"}
        with pytest.raises(EngineLost, match="p"):
            await ask(world, generate())
        assert trio.current_time() == (10.5 if waits else 0.5)


async def test_a_lone_worker_that_is_never_ready_is_asked_ever_more_seldom(autojump_clock: MockClock) -> None:
    never = Play(NotReady("it starts"), 0)
    async with routed(Fake("a", [never] * 8, otherwise=never)) as world:
        with trio.move_on_after(60):
            await ask(world, generate())
        times = world.worker("a").times
        assert times[:8] == pytest.approx([0, 0.6, 1.3, 2.2, 3.5, 5.6, 8.1, 10.6])
        assert len(times) < 30


async def test_a_worker_that_was_not_ready_and_then_lost_is_asked_again_soon(autojump_clock: MockClock) -> None:
    plays = [*[Play(NotReady("it starts"), 0)] * 3, Play(LinkLost("gone"), 1), Play(NotReady("it starts"), 0)]
    async with routed(Fake("a", plays)) as world:
        check_whole(await ask(world, generate()), generate())
        assert world.worker("a").times == pytest.approx([0, 0.6, 1.3, 2.2, 3.8, 4.5])


async def test_another_worker_is_asked_at_once_however_often_the_first_was_not_ready(autojump_clock: MockClock) -> None:
    never = Play(NotReady("it starts"), 0)
    async with routed(Fake("a", otherwise=never), Fake("b")) as world, trio.open_nursery() as nursery:
        world.pool.change("b")
        nursery.start_soon(ask, world, generate())
        await trio.sleep(9)
        world.pool.back()
        await trio.sleep(1)
        assert (world.worker("a").times[-1], world.worker("b").times) == (pytest.approx(8.1), [9])


async def test_a_request_that_may_be_what_kills_engines_kills_no_more_of_them(autojump_clock: MockClock) -> None:
    workers = [Fake(name, [Play(EngineLost(name), 0)]) for name in "abc"]
    async with routed(*workers) as world:
        with pytest.raises(EngineLost, match="b"):
            await ask(world, generate())
        assert [len(worker.asked) for worker in workers] == [1, 1, 0]


async def test_whoever_has_begun_goes_ahead_of_those_who_have_not(autojump_clock: MockClock) -> None:
    workers = Fake("a", [Play(EngineLost("1"), 2)], slots=1), Fake("b", slots=1)
    async with routed(*workers) as world, trio.open_nursery() as nursery:
        nursery.start_soon(ask, world, generate("begun"))
        await wait_all_tasks_blocked()
        nursery.start_soon(ask, world, generate("other"))
        await wait_all_tasks_blocked()
        for number in range(3):
            nursery.start_soon(ask, world, generate(str(number)))
        await trio.sleep(2.25)
        world.pool.gone = {"a"}
        await trio.sleep(60)
        asked = [each.id for each in world.worker("b").asked]
        assert (asked[:2], sorted(asked[2:])) == (["other", "new 1"], ["0", "1", "2"])


async def test_one_that_was_lost_is_not_asked_again_while_there_is_another(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)]), Fake("b", more=3)) as world:
        await ask(world, generate())
        assert len(world.worker("b").asked) == 1


async def test_a_request_that_was_resumed_before_counts_all_that_was_said(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("1"), 2)]), Fake("b")) as world:
        first = text(PROMPT)[:3]
        got = await ask(world, evolve(generate(), tokens=PROMPT + first, said=3))
        assert got.ids == text(PROMPT)[3:9]
        assert world.worker("b").asked[0].said == 5


async def test_a_bug_fails_its_request_alone(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with routed(Fake("a", [Play(ValueError("x"), 1)])) as world:
        with pytest.raises(InternalError):
            await ask(world, generate())
        check_whole(await ask(world, generate()), generate())
    assert "a bug failed a request" in caplog.text


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_the_answer_is_whole_or_ends_in_an_error(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        def plays() -> list[Play]:
            chances = (Play(), Play(rng.choice(LOSSES)("gone"), rng.randrange(12), at_once=rng.random() < 0.5))
            return [rng.choice(chances) for _ in range(12)]

        wholes = [Fake(f"w{n}", plays(), slots=2) for n in range(rng.randrange(3))]
        pairs = [Fake(f"p{n}", plays(), Leg.PREFILL, 2, bootstrap=("h", n)) for n in range(2)]
        pairs += [Fake(f"d{n}", plays(), Leg.DECODE, 2) for n in range(2)]
        async with routed(*wholes, *pairs, prefill_tokens_min=3) as world:

            async def one(name: str) -> None:
                wanted = generate(name, rng.randrange(1, 12), [rng.randrange(90) for _ in range(rng.randrange(1, 6))])
                got: list = []
                try:
                    await trio.sleep(rng.uniform(0, 20))
                    check_whole(await ask(world, wanted, got), wanted)
                except tuple(LOSSES):
                    ids = [token for reply in got if isinstance(reply, Tokens) for token in reply.ids]
                    assert ids == text(wanted.tokens)[: len(ids)]

            async with trio.open_nursery() as clients:
                for number in range(25):
                    clients.start_soon(one, str(number))

    simulate(scenario, seed)


# Over engines -----------------------------------------------------------------------------


@define(eq=False)
class Real:
    """A decode actor over a simulated engine, as a worker."""

    name: str
    engine: SimulatedEngine
    address: Address
    pool: FakePool
    busy: int = 0

    @property
    def load(self) -> Load:
        return Load(self.name, self.busy, self.engine.info.running_max)

    def begun(self, request_id: str) -> None:
        """It has room for any prompts."""

    @property
    def leg(self) -> Leg:
        return self.engine.spec.leg

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        return self.engine.info.bootstrap

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[Answer]:
        self.busy += 1
        try:
            async with self.address.ask(request, credit) as answer:
                yield answer
        finally:
            self.busy -= 1
            self.pool.change()


@asynccontextmanager
async def over_engines(*legs: Leg) -> AsyncIterator[World]:
    costs = Costs(fixed_s=1.0, per_prefill_token_s=0.25, per_running_s=0.0, release_s=0.125, transfer_s=0.5)
    async with routed(limits=FailoverLimits(resume_s=60)) as world, trio.open_nursery() as engines:

        async def act(inbox, engine: SimulatedEngine, name) -> None:
            try:
                await decode(inbox, engine, engine.info.running_max, Deadlines())
            except* EngineDied:
                world.pool.change(name, *world.pool.gone)
            while True:  # nobody starts it again here, so whoever waits in the inbox is told
                (await inbox.receive()).answer.fail(ActorLost("the worker has ended"))

        async def compute(engine: SimulatedEngine) -> None:
            with suppress(EngineDied):
                await engine.run()

        for number, leg in enumerate(legs):
            engine = SimulatedEngine(spec(leg=leg, slots=1, costs=costs), random.Random(0))
            address, inbox = priority_inbox(1, lambda _: 0)
            name = f"{leg}{number}"
            world.pool.all.append(Real(name, engine, address, world.pool))
            engines.start_soon(compute, engine)
            engines.start_soon(act, inbox, engine, name)
        world.pool.change()
        yield world
        engines.cancel_scope.cancel()


ROOMS = {
    "one worker": (Leg.BOTH,),
    "a pair": (Leg.PREFILL, Leg.DECODE),
}


async def sweep_one(legs: tuple[Leg, ...], step: int, crash: int | None, expected: list[int]) -> bool:
    """Leave, or crash one of the engines, just before the step; return whether the answer had ended by then."""
    async with over_engines(*legs, *legs) as world:
        victim = trio.CancelScope()

        def act() -> None:
            if crash is None:
                victim.cancel(reason="sweep")
            else:
                world.pool.all[crash].engine.crash()

        async def one(name: str, scope: trio.CancelScope) -> None:
            with scope:
                got = await ask(world, generate(name, 4, temperature=0.0))
                assert (len(got.ids), got.ids) == (4, expected)
                ended.append(name)

        ended: list[str] = []
        with counting(step, act) as steps:
            async with trio.open_nursery() as clients:
                clients.start_soon(one, "a" * 32, victim)
                clients.start_soon(one, "b" * 32, trio.CancelScope())
                clients.start_soon(one, "c" * 32, trio.CancelScope())
        await trio.sleep(1)
        world.check_at_rest()
        for worker in world.pool.workers():
            assert await worker.engine.load() == EngineLoad(0, 0, 0)
        assert len(ended) == 3 - victim.cancelled_caught
        with trio.fail_after(60):
            assert (await ask(world, generate("after", 4, temperature=0.0))).ids == expected
    return steps.taken < step


@pytest.fixture(scope="module")
def expected() -> list[int]:
    async def scenario(_: random.Random) -> list[int]:
        async with over_engines(Leg.BOTH) as world:
            return (await ask(world, generate("a", 4, temperature=0.0))).ids

    ids = simulate(scenario, 0)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("crash", [None, 0, 1], ids=["leave", "crash the first", "crash the second"])
@pytest.mark.parametrize("legs", ROOMS.values(), ids=ROOMS.keys())
def test_at_every_step(legs: tuple[Leg, ...], crash: int | None, expected: list[int]) -> None:
    for step in range(1, 2000):
        try:
            if simulate(lambda _, step=step: sweep_one(legs, step, crash, expected), seed=1):
                break
        except BaseException as error:
            error.add_note(f"at step {step}")
            raise
    else:
        pytest.fail("the sweep did not end")
    assert step > 40
