"""Router: both legs are asked or none, requests wait in order, and the failure of one leg ends the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.route import FailoverLimits
from protocol.errors import BadRequest, EngineLost, EngineRefused, HandOffFailed
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Logprob, Tokens, Usage
from tests.rig.calls import AnyAnswer
from tests.rig.router import LOSSES, Fake, Play, ask, check_whole, generate, met_at, pair, prefill_info, routed, text
from tests.system.simulator import simulate

# One worker -------------------------------------------------------------------------------


async def test_an_answer_passes_as_it_is(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", [Play(cached=2)])) as rig:
        wanted = generate(logprobs=0)
        got = await ask(rig, wanted)
        check_whole(got, wanted, cached=2)
        assert got.replies[1].logprobs == (Logprob(-got.ids[0] / 8),)
        assert rig.worker("w").asked == [wanted], "it is passed on as it came"
        assert trio.current_time() == 6


async def test_the_least_loaded_is_asked_and_of_equals_always_the_same(autojump_clock: MockClock) -> None:
    async with routed(Fake("b"), Fake("a"), Fake("c", slots=8)) as rig, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, rig, generate(str(number)))
            await trio.sleep(0.1)
        names = {w.name: [each.id for each in w.asked] for w in rig.pool.all}
        assert names == {"a": ["0", "4"], "b": ["1", "5"], "c": ["2", "3"]}


async def test_while_all_are_full_requests_wait_in_the_inbox_and_go_on_in_their_order(
    autojump_clock: MockClock,
) -> None:
    async with routed(Fake("w", slots=2)) as rig, trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(ask, rig, generate(str(number)))
            await trio.sleep(0.01)
        worker = rig.worker("w")
        assert [each.id for each in worker.asked] == ["0", "1"]
        assert rig.inbox.waiting == (4, 0)
        await trio.sleep(100)
        assert [each.id for each in worker.asked] == ["0", "1", "2", "3", "4", "5"]
        assert worker.times == pytest.approx([0, 0.01, 6, 6.01, 12, 12.01])


async def test_without_any_worker_a_request_waits_for_one(autojump_clock: MockClock) -> None:
    async with routed(Fake("w")) as rig, trio.open_nursery() as nursery:
        rig.pool.change("w")
        nursery.start_soon(ask, rig, generate())
        await trio.sleep(50)
        assert not rig.worker("w").asked
        rig.pool.back()
        await trio.sleep(1)
        assert rig.worker("w").times == [50]


async def test_requests_that_came_before_the_router_began_are_not_forgotten(autojump_clock: MockClock) -> None:
    for _ in range(12):  # its tasks begin in any order
        async with routed(Fake("w", slots=1, more=1), early=[generate("early")]) as rig:
            await trio.sleep(1)
            rig.worker("w").more = 0
            rig.pool.change()
            await trio.sleep(10)
            assert [each.id for each in rig.worker("w").asked] == ["early"]


async def test_no_worker_is_asked_for_a_request_that_left_while_it_waited(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", slots=1)) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(ask, rig, generate("first"))
        await wait_all_tasks_blocked()
        with trio.move_on_after(2):
            await ask(rig, generate("gone"))
        await ask(rig, generate("last"))
        assert [each.id for each in rig.worker("w").asked] == ["first", "last"]
        assert trio.current_time() == 12


async def test_an_asker_can_leave_while_its_request_waits_for_another_worker(autojump_clock: MockClock) -> None:
    async with routed(Fake("w", [Play(EngineLost("x"), 0)])) as rig:
        async with rig.address.ask(generate(), 6) as answer:
            await trio.sleep(0.5)
            rig.pool.change("w")
            await trio.sleep(1)
        await wait_all_tasks_blocked()
        assert answer.over.is_set()
        assert trio.current_time() == 1.5


# A pair -----------------------------------------------------------------------------------


async def test_every_request_has_a_room_of_its_own(autojump_clock: MockClock) -> None:
    async with routed(*pair()) as rig:
        for _ in range(30):
            await ask(rig, generate(tokens_max=1))
        rooms = [met_at(each).room for each in rig.worker("p").asked]
        assert rooms == [met_at(each).room for each in rig.worker("d").asked]
        assert len(set(rooms)) == 30
        assert all(0 <= room < 2**63 for room in rooms)
        assert max(rooms) > 2**60


async def test_what_the_prefill_had_in_its_cache_is_what_was_cached(autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(cached=3)])) as rig:
        got = await ask(rig, generate())
        assert got.finished.usage == Usage(4, 6, 3)


@pytest.mark.parametrize(
    ("prompt", "whole", "expected"), [(9, True, "w"), (10, True, "p d"), (9, False, "p d"), (10, False, "p d")]
)
async def test_a_short_prompt_goes_to_one_that_computes_both_where_there_is_one(
    prompt: int, whole: bool, expected: str, autojump_clock: MockClock
) -> None:
    workers = [*pair(), *([Fake("w")] if whole else [])]
    async with routed(*workers, prefill_tokens_min=10) as rig:
        await ask(rig, generate(prompt=range(prompt)))
        assert " ".join(each.name for each in rig.pool.all if each.asked) == expected


@pytest.mark.parametrize("missing", ["p", "d"])
async def test_a_leg_alone_is_never_asked(missing: str, autojump_clock: MockClock) -> None:
    async with routed(*pair()) as rig:
        rig.pool.change(missing)
        with trio.move_on_after(20):
            await ask(rig, generate())
        assert not any(each.asked for each in rig.pool.all)
        rig.pool.back()
        await ask(rig, generate())


async def test_a_prefill_without_a_known_rendezvous_is_not_asked(autojump_clock: MockClock) -> None:
    async with routed(*pair(), Fake("new", leg=Leg.PREFILL)) as rig:
        for _ in range(3):
            await ask(rig, generate())
        assert not rig.worker("new").asked
        assert [each.id for each in rig.worker("d").asked] == ["a"] * 3, "nothing was lost on the way"


REFUSED = BadRequest("no")


@pytest.mark.parametrize(("failing", "tokens"), [("prefill", 0), ("decode", 0), ("decode", 3)])
async def test_the_failure_of_a_leg_ends_the_other_in_the_same_instant(
    failing: str, tokens: int, autojump_clock: MockClock
) -> None:
    stuck = Play(None, 3)  # says some tokens, and then nothing for ever
    plays = {"prefill": [stuck], "decode": [stuck]} | {failing: [Play(REFUSED, tokens)]}
    prefill, decoder = pair(**plays)
    async with routed(prefill, decoder) as rig:
        with pytest.raises(BadRequest, match="no"):
            await ask(rig, generate())
        failed_at = tokens + 0.5
        assert trio.current_time() == failed_at
        other = decoder if failing == "prefill" else prefill
        ended = failing == "decode" and tokens  # the prefill had done its part
        assert other.left == ([] if ended else [failed_at])


class Late(Fake):
    """A prefill that says nothing, and fails when the decode is in the middle of its answer."""

    async def _play(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(3.25)
            answer.fail(EngineRefused("late"))


async def test_a_prefill_that_fails_in_the_middle_of_the_stream_ends_the_decode(autojump_clock: MockClock) -> None:
    _, decoder = pair()
    async with routed(Late("p", leg=Leg.PREFILL, info=prefill_info()), decoder) as rig:
        got: list[Any] = []
        with pytest.raises(EngineRefused, match="late"):
            await ask(rig, generate(tokens_max=60), got)
        assert len(got) == 4
        assert decoder.left == [3.25] == [trio.current_time()]


@pytest.mark.parametrize("after_s", [0, 0.5, 1.5, 4.5])
async def test_leaving_ends_both(after_s: float, autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(None, 0)])) as rig:
        with trio.move_on_after(after_s):
            await ask(rig, generate())
        await wait_all_tasks_blocked()
        assert trio.current_time() == after_s
        assert rig.worker("p").left == rig.worker("d").left == ([after_s] if after_s else [])


async def test_the_end_of_the_decode_ends_the_request_without_the_prefill(autojump_clock: MockClock) -> None:
    async with routed(*pair(prefill=[Play(None, 0)])) as rig:
        check_whole(await ask(rig, generate()), generate())
        assert trio.current_time() == 6
        assert rig.worker("p").left == [6]


async def test_of_the_errors_of_two_legs_the_cause_is_raised(autojump_clock: MockClock) -> None:
    plays = {"prefill": [Play(HandOffFailed("the decode went"), 0)], "decode": [Play(EngineRefused("the cause"), 0)]}
    async with routed(*pair(**plays)) as rig:
        with pytest.raises(EngineRefused, match="the cause"):
            await ask(rig, generate())


@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_a_pair_whose_leg_is_lost_is_asked_again_with_another_in_its_place_in_another_room(
    failing: str, autojump_clock: MockClock
) -> None:
    legs = pair(**{failing: [Play(EngineLost("gone"), 0)]})
    others = Fake("p2", leg=Leg.PREFILL, info=prefill_info(), more=2), Fake("d2", leg=Leg.DECODE, more=2)
    async with routed(*legs, *others) as rig:
        wanted = generate()
        check_whole(await ask(rig, wanted), wanted)
        kept, lost = ("d", "p") if failing == "prefill" else ("p", "d")
        assert [len(rig.worker(name).asked) for name in (kept, lost, f"{kept}2", f"{lost}2")] == [2, 1, 0, 1]
        first, second = rig.worker(kept).asked
        assert met_at(first).room != met_at(second).room
        assert (second.id, second.resumed_tokens) == ("new 1", 0)


async def test_after_a_failed_hand_off_both_are_avoided(autojump_clock: MockClock) -> None:
    legs = pair(decode=[Play(HandOffFailed("x"), 0)])
    others = Fake("p2", leg=Leg.PREFILL, info=prefill_info(), more=2), Fake("d2", leg=Leg.DECODE, more=2)
    async with routed(*legs, *others) as rig:
        await ask(rig, generate())
        assert [len(each.asked) for each in rig.pool.all] == [1, 1, 1, 1]


async def test_the_same_pair_is_asked_again_where_there_is_no_other(autojump_clock: MockClock) -> None:
    async with routed(*pair(decode=[Play(HandOffFailed("x"), 0)]), limits=FailoverLimits(pause_s=0.25)) as rig:
        check_whole(await ask(rig, generate()), generate())
        assert rig.worker("p").times == rig.worker("d").times == [0, 0.75]


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_pair_meets_at_the_rank_of_its_prefill_and_no_two_requests_in_one_room(
    rank: int, autojump_clock: MockClock
) -> None:
    prefill = Fake(f"p#{rank}", leg=Leg.PREFILL, info=prefill_info(ranks=3), slots=64)
    decode = Fake("d#1", leg=Leg.DECODE, slots=64)
    async with routed(prefill, decode) as rig:
        first = rig.routing.new_number()
        rig.routing.new_number = iter(range(first, first + 40)).__next__
        async with trio.open_nursery() as clients:
            for number in range(40):
                clients.start_soon(ask, rig, generate(f"{number}"))
        met = [met_at(request) for request in rig.worker(f"p#{rank}").asked]
        assert {*met} == {met_at(request) for request in rig.worker("d#1").asked}
        assert {each.rank for each in met} == {rank}
        assert len({each.room for each in met}) == 40


async def test_an_engine_that_crashes_takes_all_of_its_ranks_from_the_request(autojump_clock: MockClock) -> None:
    crash = [Play(EngineLost("gone"), 0)]
    ranks = Fake("e#0", crash), Fake("e#1")
    async with routed(*ranks) as rig:
        with pytest.raises(EngineLost):
            await ask(rig, generate())
        assert rig.worker("e#1").asked == []
    async with routed(Fake("e#0", [*crash]), Fake("e#1"), Fake("f", more=3)) as rig:
        rig.worker("e#0").plays = [Play(EngineLost("gone"), 0)]
        wanted = generate()
        check_whole(await ask(rig, wanted), wanted)
        assert [len(worker.asked) for worker in rig.pool.all] == [1, 0, 1]


# Any losses -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_lost_the_answer_is_whole_or_ends_in_an_error(seed: int) -> None:
    async def scenario(rng: random.Random) -> None:
        def plays() -> list[Play]:
            chances = (Play(), Play(rng.choice(LOSSES)("gone"), rng.randrange(12), at_once=rng.random() < 0.5))
            return [rng.choice(chances) for _ in range(12)]

        wholes = [Fake(f"w{n}", plays(), slots=2) for n in range(rng.randrange(3))]
        pairs = [Fake(f"p{n}", plays(), Leg.PREFILL, 2, info=prefill_info()) for n in range(2)]
        pairs += [Fake(f"d{n}", plays(), Leg.DECODE, 2) for n in range(2)]
        async with routed(*wholes, *pairs, prefill_tokens_min=3) as rig:

            async def ask_one(name: str) -> None:
                wanted = generate(name, rng.randrange(1, 12), [rng.randrange(90) for _ in range(rng.randrange(1, 6))])
                got: list[Any] = []
                try:
                    await trio.sleep(rng.uniform(0, 20))
                    check_whole(await ask(rig, wanted, got), wanted)
                except tuple(LOSSES):
                    ids = [token for reply in got if isinstance(reply, Tokens) for token in reply.ids]
                    assert ids == text(wanted.tokens)[: len(ids)]

            async with trio.open_nursery() as clients:
                for number in range(25):
                    clients.start_soon(ask_one, str(number))

    simulate(scenario, seed)
