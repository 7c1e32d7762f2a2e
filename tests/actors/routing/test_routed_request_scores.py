"""The log probabilities of a prompt come once, before the first token, whichever worker computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from protocol.errors import EngineLost, EngineRefused, LinkLost
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate, Started, Tokens
from tests.rig.calls import AnyAnswer
from tests.rig.prompt_scores import scores_of
from tests.rig.router import Fake, Play, Received, ask, generate, pair, prefill_info, routed, text

WANTED = evolve(generate(logprobs=1), prompt_logprobs=True)


def check(got: Received) -> None:
    """Check that an answer is whole, and begins with the scores."""
    first, *rest = got.replies
    assert first.scores == scores_of(WANTED) is not None
    assert all(isinstance(reply, Tokens) for reply in rest)
    assert got.ids == text(WANTED.tokens)[:6]


def asked(workers: Sequence[Fake]) -> list[tuple[str, bool]]:
    return [(worker.name, request.prompt_logprobs) for worker in workers for request in worker.asked]


async def test_a_worker_lost_before_it_begins_leaves_them_to_the_next(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), 0)]), Fake("b")) as rig:
        check(await ask(rig, WANTED))
        assert asked(rig.pool.all) == [("a", True), ("b", True)]


@pytest.mark.parametrize("tokens", [1, 3])
async def test_a_worker_lost_later_has_computed_them_already(tokens: int, autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), tokens)]), Fake("b")) as rig:
        check(await ask(rig, WANTED))
        assert asked(rig.pool.all) == [("a", True), ("b", False)]


async def test_the_prefill_alone_is_asked_for_them(autojump_clock: MockClock) -> None:
    async with routed(*pair()) as rig:
        check(await ask(rig, WANTED))
        assert asked(rig.pool.all) == [("p", True), ("d", False)]


class Late(Fake):
    """A prefill that begins to answer after so many seconds, or fails then."""

    after_s = 3.25

    async def _play(self, request: Generate, play: Play, answer: AnyAnswer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(self.after_s)
            if play.error is None:
                answer.put(Started(scores=scores_of(request)), 0)
                await trio.sleep_forever()
            answer.fail(play.error)
            return
        answer.fail(EngineLost("left"))


@pytest.mark.parametrize("after_s", [3.25, 9.25], ids=["in the middle of the answer", "behind its end"])
async def test_the_decodes_tokens_wait_for_a_late_prefill(after_s: float, autojump_clock: MockClock) -> None:
    prefill = Late("p", leg=Leg.PREFILL, info=prefill_info())
    prefill.after_s = after_s
    async with routed(prefill, pair()[1]) as rig:
        got: list[Any] = []
        times: list[float] = []

        class Noting(list[Any]):
            def append(self, reply: Any) -> None:
                times.append(trio.current_time())
                super().append(reply)

        got = Noting()
        check(await ask(rig, WANTED, got))
        assert times[0] == after_s
        assert times == sorted(times)
        assert trio.current_time() == max(after_s, 6)


async def test_what_waits_for_a_lost_prefill_is_computed_again(autojump_clock: MockClock) -> None:
    late = Late("p", [Play(LinkLost("gone"))], Leg.PREFILL, info=prefill_info())
    async with routed(late, Fake("q", leg=Leg.PREFILL, info=prefill_info()), pair()[1]) as rig:
        check(await ask(rig, WANTED))
        assert asked(rig.pool.all) == [("p", True), ("q", True), ("d", False), ("d", False)]


async def test_a_decode_that_fails_meanwhile_ends_the_prefill_at_once(autojump_clock: MockClock) -> None:
    late = Late("p", leg=Leg.PREFILL, info=prefill_info())
    async with routed(late, pair(decode=[Play(EngineRefused("no"), 2)])[1]) as rig:
        with pytest.raises(EngineRefused):
            await ask(rig, WANTED)
        assert trio.current_time() == 2.5
        assert late.left == [2.5]
