"""Requests with an adapter: they go to workers that have it, and a worker that has lost it costs only another try."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import trio
from attrs import evolve
from trio.testing import MockClock

from actors.engines.simulated.spec import SimulatedSpec
from protocol.errors import AdapterNotLoaded
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate
from tests.rig.gateway import INFO
from tests.rig.router import Fake, Play, ask, check_whole, generate, prefill_info, routed

PIRATE, POET = Adapter("pirate", "1"), Adapter("poet", "1")
GONE = AdapterNotLoaded("adapter 'pirate' is not loaded; there is none")


def worker(name: str, *adapters: Adapter, plays: Collection[Play] = (), slots: int = 4) -> Fake:
    return Fake(name, [*plays], info=evolve(INFO, adapters=adapters), slots=slots)


def wanted(name: str = "a", adapter: Adapter = PIRATE) -> Generate:
    return evolve(generate(name), adapter=adapter)


async def test_a_request_goes_to_a_worker_with_its_adapter_however_busy(autojump_clock: MockClock) -> None:
    async with routed(worker("a"), worker("b", POET), worker("c", POET, PIRATE)) as rig, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, rig, wanted(str(number)))
            await trio.sleep(0.01)
        assert [len(each.asked) for each in rig.pool.all] == [0, 0, 3]


async def test_an_adapter_of_other_files_is_another_one(autojump_clock: MockClock) -> None:
    async with routed(worker("a", Adapter("pirate", "2")), worker("b", PIRATE)) as rig:
        await ask(rig, wanted())
        assert [len(each.asked) for each in rig.pool.all] == [0, 1]


async def test_a_request_waits_for_its_adapter_and_holds_up_no_other(autojump_clock: MockClock) -> None:
    async with routed(worker("a", PIRATE, slots=1), worker("b")) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(ask, rig, wanted("first"))
        await trio.sleep(0.1)
        nursery.start_soon(ask, rig, wanted("second"))
        await trio.sleep(0.1)
        await ask(rig, generate("plain"))
        assert [each.id for each in rig.worker("b").asked] == ["plain"]
        assert [each.id for each in rig.worker("a").asked] == ["first", "second"]
        assert rig.worker("a").times == [0, 6], "it began when there was a slot at the worker with its adapter"


async def test_a_worker_that_has_lost_an_adapter_costs_only_another_try(autojump_clock: MockClock) -> None:
    """The router may learn of an unloaded adapter after it has asked."""
    async with routed(worker("a", PIRATE, plays=[Play(GONE, tokens=0, started=False)]), worker("b", PIRATE)) as rig:
        check_whole(await ask(rig, wanted()), wanted())
        assert [len(each.asked) for each in rig.pool.all] == [1, 1]


@pytest.mark.parametrize("others", [(), (POET,)])
async def test_without_a_worker_that_has_the_adapter_the_refusal_is_the_answer(
    others: tuple[Adapter, ...], autojump_clock: MockClock
) -> None:
    plays = [Play(GONE, tokens=0, started=False)]
    async with routed(worker("a", PIRATE, plays=plays), worker("b", *others)) as rig:
        with pytest.raises(AdapterNotLoaded):
            await ask(rig, wanted())
        assert not rig.worker("b").asked
        assert trio.current_time() < 1, "nothing is waited for"


async def test_an_adapter_that_no_worker_has_is_refused_by_any(autojump_clock: MockClock) -> None:
    refusing = Play(GONE, tokens=0, started=False)
    async with routed(worker("a", plays=[refusing]), worker("b", plays=[refusing])) as rig:
        with pytest.raises(AdapterNotLoaded):
            await ask(rig, wanted())


async def test_both_legs_of_a_pair_have_the_adapter(autojump_clock: MockClock) -> None:
    decode = SimulatedSpec(leg=Leg.DECODE).info
    prefills = [
        Fake(name, leg=Leg.PREFILL, info=evolve(prefill_info(name.encode()), adapters=own))
        for name, own in (("p1", ()), ("p2", (PIRATE,)))
    ]
    decodes = [
        Fake(name, leg=Leg.DECODE, info=evolve(decode, adapters=own)) for name, own in (("d1", ()), ("d2", (PIRATE,)))
    ]
    async with routed(*prefills, *decodes) as rig:
        with trio.fail_after(60):
            await ask(rig, wanted())
        assert {each.name: len(each.asked) for each in rig.pool.all} == {"p1": 0, "p2": 1, "d1": 0, "d2": 1}
