"""Engines that carry out operations, of which clients notice no more than a wait."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import trio
from attrs import define, field

from actors.routing.route import FailoverLimits
from tests.rig.fake_engine import Costs
from tests.system.simulator.canaries import draw_live_canary
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.operators import Operator
from tests.system.simulator.programs import STREAMS, Programs, allow_all
from tests.system.simulator.single_fault import PATIENT, SOON_S, HonestClient, SingleFault

PROGRAMS = 6
TOKENS_MAX = 24


@define(eq=False)
class OperatedEngines(SingleFault):
    """One operator, whose every operation has the right outcome, and clients whose every answer is whole."""

    numbers: Iterator[int] = field(factory=count)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        costs = Costs(
            slots=rng.randint(1, 3),
            step_s=rng.choice((0.02, 0.1)),
            release_s=rng.choice((0.0, 0.3)),
            vocabulary_size=VOCABULARY,
        )
        allow_all(costs)
        drawn = {"workers": rng.choice((1, 2, 3)), "costs": costs, "far": rng.random() < 0.3, "streams": STREAMS}
        return PATIENT | drawn | {"operated": True, "route": FailoverLimits(), "canary": draw_live_canary(rng)}

    async def live(self) -> None:
        before = self._lives()
        draw = Programs(self.rng, self.numbers)
        operator = Operator(self.system, self.rng, "operator", self.faults, self.note, draw, strict=True)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(self._stay, self.honest(f"h{number}"))
            for _ in range(PROGRAMS):
                await trio.sleep(self.rng.random())
                await operator.program(draw.draw())
            nursery.cancel_scope.cancel()
        await trio.sleep(SOON_S)
        assert self._lives() == before, "an operation has cost an engine its life"

    def _lives(self) -> list[object]:
        """Return the present life of each engine."""
        return [life.current for system in self.system.operated_systems for life in system.lives]

    async def _stay(self, client: HonestClient) -> None:
        while True:
            outcome, _ = await client.ask(self.rng.randint(1, TOKENS_MAX))
            assert outcome == "whole", f"an operation costs an answer: {outcome}"
            await trio.sleep(self.rng.choice((0.0, 0.5)))
