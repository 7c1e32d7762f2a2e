"""A router asks no prefill and decode together that disagree: the decode would end at their first meeting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.spec import SimulatedSpec
from protocol.errors import HandOffFailed
from protocol.messages.cluster import Leg
from protocol.messages.engine import EngineInfo
from protocol.messages.generation import Generate
from tests.rig.calls import AnyAnswer
from tests.rig.router import Fake, Play, ask, check_whole, generate, met_at, prefill_info, routed

DECODE = SimulatedSpec(leg=Leg.DECODE).info


def of_pages(info: EngineInfo, page_size: int) -> EngineInfo:
    return evolve(info, page_size=page_size)


def prefill(name: str, page_size: int = 16) -> Fake:
    return Fake(name, leg=Leg.PREFILL, info=of_pages(prefill_info(), page_size))


def decode(name: str, page_size: int = 16) -> Fake:
    return Fake(name, leg=Leg.DECODE, info=of_pages(DECODE, page_size))


async def test_a_new_prefill_of_another_page_size_is_never_asked_beside_a_good_one(autojump_clock: MockClock) -> None:
    async with routed(new := prefill("a", 32), old := prefill("b"), decode("d")) as rig:
        async with trio.open_nursery() as asking:
            for number in range(8):  # more than the good one has slots
                asking.start_soon(ask, rig, generate(str(number)))
        assert (len(new.asked), len(old.asked)) == (0, 8)


async def test_a_decode_that_no_prefill_can_meet_has_no_share_of_one(autojump_clock: MockClock) -> None:
    small = prefill("p")
    small.slots = 2
    async with routed(small, decode("d"), decode("odd", 32)) as rig:
        async with trio.open_nursery() as asking:
            for number in range(2):
                asking.start_soon(ask, rig, generate(str(number)))
        assert small.times[0] == small.times[1]


async def test_two_groups_of_engines_each_meet_their_own(autojump_clock: MockClock) -> None:
    workers = [make(f"{make.__name__[0]}{size}", size) for make in (prefill, decode) for size in (16, 32)]
    async with routed(*workers) as rig:
        async with trio.open_nursery() as asking:
            for number in range(8):
                asking.start_soon(ask, rig, generate(str(number)))
        asked = {worker.name: {request.hand_off for request in worker.asked} for worker in workers}
        assert asked["p16"] == asked["d16"]
        assert asked["p32"] == asked["d32"]
        assert asked["p16"]
        assert asked["p32"]


async def test_a_request_waits_until_a_leg_comes_that_its_prefill_can_meet(autojump_clock: MockClock) -> None:
    late = decode("late", 32)
    async with routed(prefill("p", 32), odd := decode("odd"), late) as rig, trio.open_nursery() as asking:
        rig.pool.change("late")

        async def asked() -> None:
            check_whole(await ask(rig, generate()), generate())

        asking.start_soon(asked)
        await trio.sleep(5)
        assert not odd.asked
        rig.pool.back()
        await trio.sleep(5)
        assert len(late.asked) == 1


class Shielded(Fake):
    """A decode that cannot reach the prefill `a`."""

    @asynccontextmanager
    async def ask(self, request: Generate, credit: int) -> AsyncIterator[AnyAnswer]:
        far = met_at(request).address == b"a"
        self.plays = [Play(HandOffFailed("it cannot be reached"), tokens=0, started=False)] if far else []
        async with super().ask(request, credit) as answer:
            yield answer


async def test_other_prefills_are_preferred_to_one_that_the_decode_cannot_reach(autojump_clock: MockClock) -> None:
    prefills = far, near = [Fake(name, leg=Leg.PREFILL, info=prefill_info(name.encode())) for name in "ab"]
    async with routed(*prefills, Shielded("d", leg=Leg.DECODE, info=DECODE)) as rig:
        for number in range(3):
            wanted = generate(str(number), tokens_max=1)
            check_whole(await ask(rig, wanted), wanted)
        assert (len(far.asked), len(near.asked)) == (1, 3), "of equals the first is asked first"


async def test_an_engine_of_an_older_version_reports_fewer_terms_and_is_paired_as_before(
    autojump_clock: MockClock,
) -> None:
    newer = evolve(DECODE, hand_off_terms=(("kv_cache_dtype", "bfloat16"),))
    async with routed(prefill("p"), Fake("d", leg=Leg.DECODE, info=newer)) as rig:
        check_whole(await ask(rig, generate()), generate())
