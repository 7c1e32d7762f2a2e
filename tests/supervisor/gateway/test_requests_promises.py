"""The limit of a request is read once, so that its cost, its credit and its processor's limits agree."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import define, evolve, field

from actors.text.limits import PromptLimits
from protocol.messages.cluster import Leg, NodeState, Offer
from supervisor.cluster import models
from supervisor.cluster.directory import Directory
from supervisor.gateway.requests import ServedModel
from tests.rig.gateway import INFO, Reply, Rig, chat, gateway_rig, post

PROMPT_MAX = 512
SMALL = Offer("small", "tiny", Leg.BOTH, 4, up=True, engine=evolve(INFO, request_tokens_max=64))
LARGE = Offer("large", "tiny", Leg.BOTH, 4, up=True, engine=evolve(INFO, request_tokens_max=512))
BOTH = (SMALL, LARGE)


@define(eq=False)
class Offers:
    """The offers of another node, which change right after the gateway has read them for the `at`-th time."""

    rig: Rig
    before: tuple[Offer, ...]
    after: tuple[Offer, ...]
    at: int = 1
    looks: int = 0
    directory: Directory = field(factory=lambda: Directory("here"))

    def __attrs_post_init__(self) -> None:
        self.tell(self.before)
        served = self.rig.gateway.runner.served["tiny"]
        self.rig.gateway.runner.served = {"tiny": ServedModel(served.model, served.ask, self.look)}

    def look(self) -> int:
        self.looks += 1
        found = models.request_tokens_max(self.directory, "tiny")
        if self.looks == self.at:
            self.tell(self.after)
        return found

    def tell(self, offers: tuple[Offer, ...]) -> None:
        self.directory.merge_state("far", NodeState(offers))
        self.rig.limits[0] = models.request_limits(self.directory, "tiny", PROMPT_MAX)


async def answered(rig: Rig, **fields: Any) -> Reply:
    client = await rig.client()
    reply = await client.ask(post(chat("n=400", **fields)))
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.parametrize("at", [1, 2])
async def test_an_engine_that_leaves_during_admission_does_not_change_the_limit(at: int) -> None:
    async with gateway_rig() as rig:
        offers = Offers(rig, BOTH, (LARGE,), at)
        reply = await answered(rig)
    assert reply.json["usage"]["total_tokens"] == 64, "more than its cost was weighed as, and its space promised for"
    assert reply.json["choices"][0]["finish_reason"] == "length"
    assert offers.looks == 1


async def test_a_smaller_engine_that_joins_during_admission_lowers_the_limit() -> None:
    async with gateway_rig() as rig:
        Offers(rig, (LARGE,), BOTH)
        reply = await answered(rig)
    assert reply.json["usage"]["total_tokens"] == 64


async def test_a_request_for_which_no_engine_was_ready_is_refused_though_one_is_by_now() -> None:
    async with gateway_rig() as rig:
        Offers(rig, (), BOTH)
        reply = await (await rig.client()).ask(post(chat()))
        assert (reply.status, reply.error["code"]) == (503, "not_ready")
        assert (await answered(rig)).json["usage"]["total_tokens"] == 64, "and the next is answered"


@pytest.mark.parametrize(
    ("total_max", "total", "prompt"), [(None, 100, 80), (200, 100, 80), (90, 90, 80), (50, 50, 50)]
)
def test_prompt_limits_within_a_total_are_the_smaller_of_both(total_max: int | None, total: int, prompt: int) -> None:
    limits = PromptLimits(INFO, 100, 80).within(total_max)
    assert (limits.total_max, limits.prompt_max) == (total, prompt)
