"""Nodes of encoders that are lost, and what that may cost clients: those without pictures nothing."""

from __future__ import annotations

import random

import trio
from attrs import define, evolve, field

from tests.rig.vision import MEDIA_INFO
from tests.system.simulator.broken_encoders import own_picture
from tests.system.simulator.cluster import SECTION, SETTLED_S, OfCluster
from tests.system.simulator.cluster_faults import ClusterFaults
from tests.system.simulator.cluster_single_fault import CLIENTS, TOKENS_MAX, TWO_OF_ALL, shape
from tests.system.simulator.faults import OF_NODES
from tests.system.simulator.nodes import NodeSlot
from tests.system.simulator.pictured import Sight
from tests.system.simulator.seed import DEADLINES
from tests.system.simulator.single_fault import SOON_S, HonestClient, SingleFault


@define(eq=False)
class LostEncoder(OfCluster, SingleFault):
    """A node that has an encoder and nothing else, and is lost in some way; often there is another one."""

    node_slot: NodeSlot = field(init=False)
    another: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        alone = [node_slot for node_slot in self.cluster.node_slots if node_slot.encoders]
        self.node_slot, self.another = self.rng.choice(alone), len(alone) > 1

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        deadlines = evolve(DEADLINES, first_token_s=2 * SECTION.stalled_s)
        return shape(rng, TWO_OF_ALL) | {"deadlines": deadlines, "sight": Sight(MEDIA_INFO, rng.choice((1, 2)), {})}

    async def live(self) -> None:
        if not self.another:
            self.faults.pictures.happened.add("anything")
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(self._stay, self.honest(f"h{number}"))
                nursery.start_soon(self._send_pictures, self.honest(f"p{number}"))
            await trio.sleep(self.rng.random())
            kind = self.rng.choice(OF_NODES)
            self.note(kind, self.node_slot.name, self.another)
            assert isinstance(self.faults, ClusterFaults)
            await self.faults.befall(kind, self.node_slot)
            await trio.sleep(SECTION.silent_s + SOON_S)
            nursery.cancel_scope.cancel()
        if self.node_slot.life is None:
            self.node_slot.start()
        await trio.sleep(SECTION.stalled_s + SETTLED_S)
        self.faults.pictures.happened.clear()
        outcome, took_s = await self.honest("again").ask(TOKENS_MAX, content=own_picture("again", 0))
        assert outcome == "whole", f"an encoder that is back is not used: {outcome}"
        self.note("well again", took_s)

    @property
    def one_s(self) -> float:
        """How long an answer takes without a fault."""
        costs = [node_slot.costs for node_slot in self.cluster.node_slots]
        return TOKENS_MAX * max(each.step_s + each.prefill_s for each in costs) + 1.0

    async def _stay(self, client: HonestClient) -> None:
        while True:
            outcome, took_s = await client.ask(self.rng.randint(1, TOKENS_MAX))
            assert outcome == "whole", f"an encoder that is lost costs an answer without pictures: {outcome}"
            assert took_s <= (1 + 2 * CLIENTS) * self.one_s + SOON_S, f"an encoder that is lost costs {took_s} s"

    async def _send_pictures(self, client: HonestClient) -> None:
        while True:
            outcome, took_s = await client.ask(TOKENS_MAX, content=own_picture(client.name, client.asked))
            if self.another:
                assert outcome == "whole", f"one of two encoders is lost, and costs an answer: {outcome}"
                within_s = SECTION.silent_s + SECTION.heartbeat_s + (1 + 2 * CLIENTS) * self.one_s + SOON_S
                assert took_s <= within_s, f"one of two encoders is lost, and costs {took_s} s"
            await trio.sleep(0.1)
