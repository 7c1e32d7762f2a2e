"""A planned loss is no failure: drains and replaced links leave a request as many resumes as it had."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from actors.routing.failover import is_planned
from actors.routing.route import FailoverLimits
from protocol.errors import Draining, EngineLost, LinkLost, NotReady
from tests.actors.test_router import Fake, Play, ask, check_whole, generate, routed


class Replaced(LinkLost):
    """What a link is lost with that has made room for a newer one."""

    code = "link_lost"  # of the class that it stands for: a test adds no code to the taxonomy


@pytest.mark.parametrize("loss", [Draining, Replaced])
async def test_b15_five_drains_in_a_row_lose_nothing(
    loss: type[Draining | Replaced], autojump_clock: MockClock
) -> None:
    workers = [Fake(str(n), [Play(loss("it goes"), 8)], more=n % 4) for n in range(5)]
    async with routed(*workers, Fake("last", slots=9, more=8)) as world:
        wanted = generate(tokens_max=50)
        check_whole(await ask(world, wanted), wanted)
        assert [len(worker.asked) for worker in workers] == [1] * 5


async def test_b15_drains_leave_the_resumes_for_losses(autojump_clock: MockClock) -> None:
    plays = [Draining("1"), LinkLost("2"), Draining("3"), LinkLost("4"), Draining("5"), LinkLost("6")]
    workers = [Fake(str(n), [Play(loss, 2)], slots=8, more=n) for n, loss in enumerate(plays)]
    async with routed(*workers, limits=FailoverLimits(resumes_max=3, pause_s=0.01)) as world:
        wanted = generate(tokens_max=20)
        check_whole(await ask(world, wanted), wanted)


@pytest.mark.parametrize(("most", "whole"), [(2, False), (3, True)])
async def test_drains_have_a_limit_of_their_own(most: int, whole: bool, autojump_clock: MockClock) -> None:
    workers = [Fake(str(n), [Play(Draining(str(n)), 2)], more=n) for n in range(3)]
    async with routed(*workers, Fake("last", slots=9, more=8), limits=FailoverLimits(drains_max=most)) as world:
        wanted = generate(tokens_max=20)
        if whole:
            check_whole(await ask(world, wanted), wanted)
        else:
            with pytest.raises(Draining, match="2"):
                await ask(world, wanted)


def test_what_is_planned() -> None:
    assert is_planned(Draining("x"))
    assert is_planned(Replaced("x"))
    assert not any(map(is_planned, (LinkLost("x"), EngineLost("x"), NotReady("x"))))
