"""The hand-off of a pair: what a router can make of a prefill's info."""

from __future__ import annotations

import pytest
from attrs import evolve
from trio.testing import MockClock

from actors.engines.sglang.hand_off import HAND_OFF
from actors.routing.route import FailoverLimits
from protocol.errors import HandOffFailed
from protocol.messages.cluster import Leg
from tests.rig.router import Fake, ask, check_whole, generate, pair, prefill_info, routed

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
