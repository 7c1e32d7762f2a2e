"""Canaries of the simulator, which are on in some seeds, and idle engines that freeze."""

from __future__ import annotations

import random
from math import inf
from typing import ClassVar

import trio
from attrs import define

from protocol.errors import EngineStuck
from tests.rig.fake_engine import Costs
from tests.rig.small_system import LiveCanary, SmallSystem
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.single_fault import PATIENT, SOON_S, SingleFault

BETWEEN_S = 0.05  # between two looks
START_S = 2.0  # until an engine that has failed is up again
TOKENS_MAX = 8


def draw_live_canary(rng: random.Random) -> LiveCanary:
    """Draw the canary of engines that answer quickly, unless they are frozen."""
    return LiveCanary(after_s=rng.choice((0.3, 1.0, 3.0)), within_s=rng.choice((2.0, 5.0)))


@define(eq=False)
class FrozenEngine(SingleFault):
    """An idle engine that computes nothing any more, behind a link that lives."""

    falls: ClassVar[tuple[type[Exception], ...]] = (EngineStuck,)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        costs = Costs(slots=rng.choice((1, 2)), step_s=rng.choice((0.02, 0.05)), vocabulary_size=VOCABULARY)
        network = {"delay_s": rng.choice((0.0, 0.002)), "piece_max": 1000, "room": 65536}
        drawn = {"workers": rng.choice((1, 2, 3)), "costs": costs, "far": False, "network": network}
        return PATIENT | drawn | {"canary": draw_live_canary(rng)}

    def choose(self) -> tuple[SmallSystem, int]:
        """Return the node and the number of the engine that freezes."""
        return self.system, self.rng.randrange(self.system.workers)

    async def live(self) -> None:
        system, number = self.choose()
        canary = self.system.canary
        assert canary is not None
        await self._stay_unseen(5 * canary.after_s + self.rng.random())
        host = system.hosts[number]
        self.note("freezes", number)
        began_at = trio.current_time()
        getattr(host, "engine", host).stall(inf)  # a host has an engine, or is one
        within_s = canary.after_s + canary.within_s + SOON_S
        with trio.move_on_after(within_s) as looking:
            while system.engines[number].current is not None:  # noqa: ASYNC110  # of a tree that ends it
                await trio.sleep(BETWEEN_S)
        assert not looking.cancelled_caught, f"a frozen engine is in service after {within_s} s"
        with trio.move_on_after(START_S) as looking:
            while system.engines[number].current is None:  # noqa: ASYNC110  # of a tree that starts it
                await trio.sleep(BETWEEN_S)
        assert not looking.cancelled_caught, "a frozen engine is not replaced"
        assert system.hosts[number] is not host
        self.note("replaced", round(trio.current_time() - began_at, 2))
        await self._stay_unseen(2 * canary.after_s)

    async def _stay_unseen(self, lasts_s: float) -> None:
        """Check that canaries show nowhere, and that they delay no request by more than a step and a release."""
        ends_at = trio.current_time() + lasts_s
        client = self.honest("beside")
        while trio.current_time() < ends_at:
            for _ in range(20):
                await trio.sleep(BETWEEN_S)
                self._check_unseen()
            outcome, took_s = await client.ask(self.rng.randint(1, TOKENS_MAX))
            assert outcome == "whole", f"a canary costs an answer: {outcome}"
            assert took_s <= self.answered_s, f"beside canaries an answer took {took_s} s, not {self.answered_s} s"

    @property
    def answered_s(self) -> float:
        """The longest that a short answer takes."""
        costs = self.system.costs
        return (TOKENS_MAX + 2) * costs.step_s + costs.release_s + SOON_S / 4

    def _check_unseen(self) -> None:
        """Check that no request is counted anywhere, since no client has any."""
        self.system.check_routes()
        assert not self.system.gate.inside, "a canary is admitted at the gateway"
        assert not self.system.gateway.runner.running, "a canary is counted at the gateway"
