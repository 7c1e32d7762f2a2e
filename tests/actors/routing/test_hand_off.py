"""The hand-off of a pair: what a router can make of a prefill's info."""

from __future__ import annotations

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.sglang.hand_off import HAND_OFF
from actors.routing.reservations import ReservationStatistics
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, HandOffFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import HandOff
from protocol.messages.generation import Finished, FinishReason, Generate, Started, Usage
from tests.rig.calls import AnyAnswer
from tests.rig.router import Fake, Play, ask, check_whole, generate, pair, prefill_info, routed

LIMITS = FailoverLimits(resumes_max=1)


async def test_a_prefill_of_an_unknown_kind_is_asked_for_nothing_and_leaves_no_reservation(
    autojump_clock: MockClock,
) -> None:
    prefill = Fake("p", leg=Leg.PREFILL, info=evolve(prefill_info(), kind="new"))
    async with routed(prefill, Fake("d", leg=Leg.DECODE), limits=LIMITS) as rig:
        with pytest.raises(HandOffFailed, match="kind of prefill p"):
            await ask(rig, generate())
        assert not rig.worker("d").asked


async def test_a_request_goes_on_at_another_prefill_than_one_with_an_unreadable_address(
    autojump_clock: MockClock,
) -> None:
    bad = Fake("bad", leg=Leg.PREFILL, info=evolve(prefill_info(b"?"), kind="sglang"), slots=8)
    async with routed(bad, *pair(), limits=LIMITS) as rig:
        rig.routing.hand_offs = {**rig.routing.hand_offs, "sglang": HAND_OFF}
        for _ in range(4):
            check_whole(await ask(rig, generate()), generate())
        assert not bad.asked


# A sequential pair --------------------------------------------------------------------------


def sequential(*prefill: Play, decode: list[Play] | None = None) -> tuple[Fake, Fake]:
    """Return a prefill that returns states, a second after it is asked, and a decode."""
    info = prefill_info(hand_off=HandOff.SEQUENTIAL)
    first = Fake("p", list(prefill), Leg.PREFILL, otherwise=Play(state=b"state"), info=info)
    return first, Fake("d", decode or [], Leg.DECODE)


async def test_a_sequential_decode_is_asked_with_the_state_and_its_first_token_ends_the_prefill(
    autojump_clock: MockClock,
) -> None:
    prefill, decode = sequential(Play(state=b"state", cached=3))
    async with routed(prefill, decode) as rig:
        got = await ask(rig, generate())
        check_whole(got, generate(), cached=3)
    assert [(each.hand_off, each.id) for each in (*prefill.asked, *decode.asked)] == [(b"", "a"), (b"state", "a")]
    assert (prefill.times, decode.times, prefill.left, decode.left) == ([0], [1], [2], [])
    assert (prefill.has_begun, decode.has_begun) == (["a"], ["a"])


async def test_a_decode_is_reserved_while_its_prompt_is_computed_and_the_prefill_is_shared_until_it_has_begun(
    autojump_clock: MockClock,
) -> None:
    async with routed(*sequential()) as rig, trio.open_nursery() as clients:
        clients.start_soon(ask, rig, generate())
        await trio.sleep(0.5)
        assert rig.routing.statistics() == ReservationStatistics(requests=1, prompts_pending=1)
        await trio.sleep(1)
        assert rig.routing.statistics() == ReservationStatistics(requests=0, prompts_pending=1)
        await trio.sleep(1)
        assert rig.routing.statistics() == ReservationStatistics(requests=0, prompts_pending=0)


@pytest.mark.parametrize("after_s", [0.5, 1.5, 3.5])
async def test_leaving_a_sequential_pair_leaves_every_leg_that_was_asked(
    after_s: float, autojump_clock: MockClock
) -> None:
    prefill, decode = sequential()
    async with routed(prefill, decode) as rig:
        with trio.move_on_after(after_s):
            await ask(rig, generate())
    assert (prefill.left, decode.left) == ([min(after_s, 2)], [] if after_s < 1 else [after_s])


LOST = ActorLost("gone")


@pytest.mark.parametrize(
    ("prefill", "decode", "asked", "left", "hand_offs"),
    [
        ([Play(LOST, 0)], [], ([0, 0.75], [1.75]), ([2.75], []), [b"state"]),
        ([Play(LOST, state=b"lost")], [], ([0, 1.75], [1, 2.75]), ([3.75], [1.5]), [b"lost", b"state"]),
        ([Play(state=b"one")], [Play(LOST, 0)], ([0, 1.75], [1, 2.75]), ([1.5, 3.75], []), [b"one", b"state"]),
        ([Play(state=b"one")], [Play(LOST, 2)], ([0, 3.75], [1, 4.75]), ([2, 5.75], []), [b"one", b"state"]),
    ],
    ids=["before the state", "with the state", "before the first token", "in the answer"],
)
async def test_the_failure_of_a_sequential_leg_ends_the_other_and_a_new_prefill_is_made(
    prefill: list[Play],
    decode: list[Play],
    asked: tuple[list[float], list[float]],
    left: tuple[list[float], list[float]],
    hand_offs: list[bytes],
    autojump_clock: MockClock,
) -> None:
    first, second = sequential(*prefill, decode=decode)
    async with routed(first, second, limits=FailoverLimits(pause_s=0.25)) as rig:
        check_whole(await ask(rig, generate()), generate())
    assert (first.times, second.times) == asked
    assert (first.left, second.left) == left
    assert [each.hand_off for each in second.asked] == hand_offs
    assert {each.hand_off for each in first.asked} == {b""}


async def test_a_sequential_prefill_that_returns_tokens_fails_the_hand_off(autojump_clock: MockClock) -> None:
    async with routed(*sequential(Play()), limits=FailoverLimits(resumes_max=0)) as rig:
        with pytest.raises(HandOffFailed, match="prefill p returned no state"):
            await ask(rig, generate())
        assert not rig.worker("d").asked


class Ends(Fake):
    """A prefill whose answer ends by itself half a second behind its state."""

    async def _hold(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        await trio.sleep(1)
        answer.put(Started(hand_off=play.state), 0)
        await trio.sleep(0.5)
        answer.end(Finished(FinishReason.LENGTH, Usage(4, 0)))


async def test_a_sequential_prefill_that_ends_too_early_fails_the_hand_off_and_ends_the_decode(
    autojump_clock: MockClock,
) -> None:
    prefill, decode = sequential()
    ends = Ends("p", leg=Leg.PREFILL, otherwise=prefill.otherwise, info=prefill.info)
    async with routed(ends, decode, limits=FailoverLimits(resumes_max=0)) as rig:
        with pytest.raises(HandOffFailed, match="prefill p ended before the decode had the KV cache"):
            await ask(rig, generate())
    assert decode.left == [1.5]
