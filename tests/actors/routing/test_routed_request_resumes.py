"""Resumed requests: their usage, their penalties, their weights, and no reservation left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.routing.least_loaded import least_loaded
from actors.routing.load import Load
from actors.routing.ports import RoutingObserver
from protocol.errors import EngineLost, LinkLost
from protocol.messages import Generate, Grammar, GrammarKind, Usage
from tests.rig.router import PROMPT, Fake, Play, ask, check_whole, generate, pair, routed, text


async def test_the_cached_tokens_are_those_of_the_first_prefill_though_the_second_has_more(
    autojump_clock: MockClock,
) -> None:
    plays = {"prefill": [Play(cached=3), Play(cached=5)], "decode": [Play(LinkLost("gone"), 2)]}
    async with routed(*pair(**plays)) as rig:
        got = await ask(rig, generate())
        assert len(rig.worker("p").asked) == 2
        assert got.finished.usage == Usage(4, 6, 3)


async def test_a_pair_without_a_rendezvous_leaves_no_reservation(autojump_clock: MockClock) -> None:
    async with routed(*pair(), Fake("w")) as rig:
        prefill = rig.worker("p")
        await wait_all_tasks_blocked()

        def forgetful(request: Generate, loads: Sequence[Load]) -> int:
            if [load.name for load in loads] == ["d"]:  # the prefill has just been chosen
                prefill.bootstrap = None
            return least_loaded(request, loads)

        rig.routing.policy = forgetful
        got = await ask(rig, generate())
        assert len(got.ids) == 6
        assert len(rig.worker("w").asked) == 1  # and `routed` sees that no place is kept


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.05}]
)
async def test_d10_an_answer_with_a_penalty_goes_on_elsewhere_with_the_number_of_tokens_sent(
    penalty: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b")) as rig:
        wanted = generate(**penalty)
        check_whole(await ask(rig, wanted), wanted)
        assert (rig.worker("b").asked[0].said, rig.worker("b").asked[0].tokens[4:]) == (3, text(PROMPT)[:3])


async def test_an_observer_gets_the_losses_that_could_not_be_resumed(autojump_clock: MockClock) -> None:
    observed: list[Any] = []

    class Observer(RoutingObserver):
        def call_not_resumed(self, code: str) -> None:
            observed.append(code)

    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b")) as rig:
        rig.routing.observer = Observer()
        with pytest.raises(EngineLost):
            await ask(rig, generate(grammar=Grammar(GrammarKind.REGEX, "a*")))
    assert observed == ["engine_lost"]


async def test_c8_an_answer_does_not_go_on_with_other_weights(autojump_clock: MockClock) -> None:
    async with routed(Fake("a", [Play(EngineLost("gone"), 3)]), Fake("b")) as rig:
        rig.pool.has = "old"
        rig.pool.change("b")
        wanted = generate("x", tokens_max=10)
        async with trio.open_nursery() as nursery:

            async def turns() -> None:
                await trio.sleep(2.5)
                rig.pool.has = "new"
                rig.pool.change("a")

            nursery.start_soon(turns)
            with pytest.raises(EngineLost):
                await ask(rig, wanted)
        assert rig.worker("b").asked == []
        check_whole(await ask(rig, generate("y")), generate("y"))  # what begins now begins with the new ones
