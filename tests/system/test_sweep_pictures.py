"""A client disconnects, or something of its request dies, at every single step from a picture to an answer about it.

In the fast tests each second step meets one way of leaving and one death; in the nightly ones each step meets all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import pytest
import trio
from attrs import define, field

from protocol.messages.cluster import Leg
from tests.rig.fake_engine import Costs
from tests.rig.fake_host import FakeHost
from tests.rig.gateway import post
from tests.rig.network import SimTransport
from tests.rig.scheduler import sweep, taking_turns
from tests.rig.small_system import living
from tests.rig.vision import MEDIA_INFO
from tests.system.simulator import counting, judge
from tests.system.simulator.clients import GONE, Reader, chat
from tests.system.simulator.encoders import EncoderCosts
from tests.system.simulator.legs import LegCosts, LegHost, Rooms
from tests.system.simulator.model import VOCABULARY, PlannedRequest
from tests.system.simulator.pictured import Sight
from tests.system.simulator.pictures import Picture
from tests.system.simulator.probes import each_alone
from tests.system.simulator.system import System

PICTURE = Picture("own", 4, 6, remote=True)
VICTIM = PlannedRequest(turns=(("user", ("the victim", PICTURE, "sees")),), tokens_max=2, stream=False)
BYSTANDER = PlannedRequest(turns=(("user", (PICTURE, "is seen by a bystander")),), tokens_max=1, stream=False)
LEGS = (Leg.PREFILL, Leg.DECODE)
LOST = frozenset({"engine_lost", "actor_lost", "not_ready", "unanswered"})


@define(eq=False)
class ThreeLegs(System):
    """A system whose model takes pictures: an encoder, a prefill and a decode."""

    legs: tuple[LegCosts, ...] = field(kw_only=True)
    rooms_of_legs: Rooms = field(kw_only=True)

    def costs_of(self, number: int) -> Costs:
        return self.legs[number]

    async def check_serves(self) -> None:
        """Check that the encoder has its slot, and that an answer about two pictures is right."""
        await self.encoding.check_serves()
        await each_alone(self, 1, 2, first=2)


def three_legs(rng: Random) -> ThreeLegs:
    rooms = Rooms(transfer_s=0.02)
    sight = Sight(MEDIA_INFO, 1, {})
    costs = Costs(slots=1, step_s=0.05, release_s=0.03, vocabulary_size=VOCABULARY)
    legs = tuple(
        LegCosts(slots=1, step_s=0.05, release_s=0.03, vocabulary_size=VOCABULARY, leg=leg, node="main") for leg in LEGS
    )
    for each in (costs, *legs):
        sight.open(each)

    def host_of(transport: SimTransport, leg_costs: Costs) -> FakeHost:
        return LegHost(transport, leg_costs, rooms=rooms)

    return ThreeLegs(
        rng=rng,
        costs=costs,
        legs=legs,
        rooms_of_legs=rooms,
        host_of=host_of,
        workers=len(LEGS),
        encoders=1,
        encoder_costs=EncoderCosts(slots=2),
        media_delay_s=0.01,
        inbox_size=1,
        requests_max=3,
    )


async def ask(client: Reader, wanted: PlannedRequest, answer: judge.Received) -> None:
    with suppress(*GONE):
        await client.send(post(chat(wanted)))
        await client.read_answer(answer)
    client.hang_up()


async def check_nothing_is_left(system: ThreeLegs) -> None:
    await trio.sleep(0.3)  # a Cancel's way to the engines and a release: far less than any deadline
    assert not system.holding(VICTIM.prompt), "whoever leaves is aborted"
    assert not system.gallery.held[PICTURE.name], "a picture is held for nobody"
    await trio.sleep(10)
    await system.check_at_rest()


async def leave_at(rng: Random, step: int, *, late: bool) -> bool:
    """Close the victim's socket just before the step; return whether that came before it had ended.

    Another client wants the same picture at the same time or, if it is `late`, as soon as the victim has left.
    """
    async with living(three_legs(rng)) as system:
        victim, received = Reader(system.connect()), judge.Received()
        bystander, other, left = Reader(system.connect()), judge.Received(), trio.Event()

        def leave() -> None:
            victim.hang_up()
            left.set()

        async def come() -> None:
            if late:
                await left.wait()
            await ask(bystander, BYSTANDER, other)

        async with trio.open_nursery() as others:
            if late:
                others.start_soon(come)
            with counting(step, leave) as steps:
                async with trio.open_nursery() as clients:
                    clients.start_soon(ask, victim, VICTIM, received)
                    if not late:
                        clients.start_soon(come)
            left.set()
        assert judge.http(VICTIM, received, LOST.__contains__, stayed=False) in {"left", "whole"}
        assert judge.http(BYSTANDER, other, frozenset[str]().__contains__, stayed=True) == "whole"
        await check_nothing_is_left(system)
        assert len({life.path for life in system.child_events}) * 2 == len(system.child_events), "it restarts nobody"
    return steps.taken < step


async def die_at(rng: Random, step: int, death: Callable[[ThreeLegs], None]) -> bool:
    """Let something die just before the step; return whether that came before the victim had ended."""
    async with living(three_legs(rng)) as system:
        victim, received = Reader(system.connect()), judge.Received()
        with counting(step, lambda: death(system)) as steps:
            await ask(victim, VICTIM, received)
        judge.http(VICTIM, received, LOST.__contains__, stayed=True)
        await check_nothing_is_left(system)
        await system.check_serves()
    return steps.taken < step


def cut_the_prefill(system: ThreeLegs) -> None:
    system.transports["line 0"].cut()


def cut_the_decode(system: ThreeLegs) -> None:
    system.transports["line 1"].cut()


def crash_the_encoder(system: ThreeLegs) -> None:
    system.encoding.engines[0].crash()


def kill_the_decoders(system: ThreeLegs) -> None:
    system.media.kill_decoders(0.0)


DEATHS = (cut_the_prefill, cut_the_decode, crash_the_encoder, kill_the_decoders)


@pytest.mark.parametrize(("late", "first", "every"), taking_turns([False, True], stride=2))
def test_a_client_that_disconnects_at_any_step_costs_another_who_wants_its_picture_nothing(
    late: bool, first: int, every: int
) -> None:
    sweep(lambda rng, step: leave_at(rng, step, late=late), first=first, every=every)


@pytest.mark.parametrize(("death", "first", "every"), taking_turns(DEATHS, stride=2))
def test_a_death_at_any_step_to_an_answer_about_a_picture_leaves_nothing(
    death: Callable[[ThreeLegs], None], first: int, every: int
) -> None:
    sweep(lambda rng, step: die_at(rng, step, death), first=first, every=every)
