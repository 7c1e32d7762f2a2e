"""A pool that is full, beside an empty one, of whose requests it delays none."""

from __future__ import annotations

import random

import trio
from attrs import define

from tests.system.simulator.cluster import OfCluster
from tests.system.simulator.cluster_single_fault import TWO_OF_ALL, shape
from tests.system.simulator.pools import TARGET_MAX_MS, pools_by_target
from tests.system.simulator.single_fault import HEAVY_TOKENS, SOON_S, SingleFault

CROWD = 16  # requests at a time, of which few have a slot
TOKENS_MAX = 4
ASKED = 6
EARLY_MS, LATE_MS = f"{TARGET_MAX_MS / 4:g}", f"{TARGET_MAX_MS * 3 / 4:g}"  # of the first token, and of each other


@define(eq=False)
class FullPool(OfCluster, SingleFault):
    """More requests than one of two pools of every leg can take, and one client of the other pool."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng, TWO_OF_ALL) | {"requests_max": 2 * CROWD}

    async def live(self) -> None:
        system = self.cluster
        system.routing.levels = pools_by_target(system.pooled_workers())
        full_ms, other_ms = self.rng.sample((EARLY_MS, LATE_MS), 2)
        slowest = max(slot.costs.step_s + slot.costs.release_s for slot in system.node_slots)
        # Both legs of a pair take a step for the first token, and a prompt takes a step of its own.
        within_s = (TOKENS_MAX + 4) * slowest + system.plan.rooms.transfer_s + SOON_S / 2
        async with trio.open_nursery() as nursery:
            for number in range(CROWD):
                nursery.start_soon(self._crowd, number, full_ms)
            await trio.sleep(1 + self.rng.random())
            self.note("waiting", system.routed.waiting)
            assert any(system.routed.waiting) or self._queued(), "the pool is not full"
            client = self.honest("other")
            for _ in range(ASKED):
                outcome, took_s = await client.ask(TOKENS_MAX, x_slo_ttft_ms=other_ms, x_slo_tpot_ms=other_ms)
                assert outcome == "whole", f"a full pool costs an answer of another: {outcome}"
                assert took_s <= within_s, f"beside a full pool an answer took {took_s} s, not {within_s} s"
                await trio.sleep(self.rng.random() / 4)
            nursery.cancel_scope.cancel()

    def _queued(self) -> bool:
        """Whether a worker has more requests than slots."""
        return any(worker.load.overcommitted for worker in self.system.directory.workers("tiny"))

    async def _crowd(self, number: int, target_ms: str) -> None:
        client = self.honest(f"crowd{number}")
        client.crowds = True
        while True:
            await client.ask(HEAVY_TOKENS, x_slo_ttft_ms=target_ms, x_slo_tpot_ms=target_ms)
