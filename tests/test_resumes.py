"""What a request that lost its worker must not do: forget what was first, keep a place."""

from __future__ import annotations

from trio.testing import wait_all_tasks_blocked

from actors.routing.load import least_loaded
from protocol.errors import LinkLost
from protocol.messages import Usage
from tests.test_router import Fake, Play, ask, generate, pair, routed


async def test_what_was_cached_is_what_the_first_prefill_had_though_the_second_has_more(autojump_clock):
    plays = {"prefill": [Play(cached=3), Play(cached=5)], "decode": [Play(LinkLost("gone"), 2)]}
    async with routed(*pair(**plays)) as world:
        got = await ask(world, generate())
        assert len(world.worker("p").asked) == 2
        assert got.finished.usage == Usage(4, 6, 3)


async def test_a_pair_that_cannot_meet_after_all_keeps_no_place(autojump_clock):
    async with routed(*pair(), Fake("w")) as world:
        prefill = world.worker("p")
        await wait_all_tasks_blocked()

        def forgetful(loads, tokens):
            if [load.name for load in loads] == ["d"]:  # the prefill has just been chosen
                prefill.bootstrap = None
            return least_loaded(loads, tokens)

        world.routing.policy = forgetful
        got = await ask(world, generate())
        assert len(got.ids) == 6
        assert len(world.worker("w").asked) == 1  # and `routed` sees that no place is kept
