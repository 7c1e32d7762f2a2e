"""Encoders, decoders and hosts of pictures that are broken, and what they may cost the clients beside them: nothing."""

from __future__ import annotations

import random
from math import inf
from typing import ClassVar

import trio
from attrs import define, field

from actors.engines.simulated.spec import Faults
from actors.routing.route import FailoverLimits
from protocol.errors import EngineStuck, StartFailed
from tests.rig.fake_engine import Costs
from tests.rig.vision import MEDIA_INFO
from tests.system.simulator.media import LIMITS
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.pictured import Sight, encoder_costs
from tests.system.simulator.pictures import SHARED, Content, Picture
from tests.system.simulator.single_fault import PATIENT, SOON_S, HonestClient, SingleFault

TOKENS_MAX = 8
SIGHT = Sight(MEDIA_INFO, 1, {})
BREAKS = (
    "crashes",
    "stalls",
    "keeps its batches",
    "is slow",
    "makes wrong rows",
    "does not start",
    "decoders",
    "hosts",
)


def shape(rng: random.Random) -> dict[str, object]:
    """Return the shape of a system whose engines are well, with an encoder or two."""
    costs = Costs(slots=rng.choice((2, 3)), step_s=rng.choice((0.02, 0.05)), vocabulary_size=VOCABULARY)
    SIGHT.open(costs)
    more = {"costs": costs, "encoders": 1, "encoder_costs": encoder_costs(rng), "far": False, "media_limits": LIMITS}
    return PATIENT | more | {"workers": rng.choice((1, 2)), "route": FailoverLimits()}


def own_picture(name: str, number: int, trouble: str = "") -> Content:
    """Return a message with a picture that nobody else sends."""
    return (Picture(f"{name}-{number}", 4, 6, trouble=trouble), f"{name}.{number}")


@define(eq=False)
class BrokenEncoder(SingleFault):
    """An encoder, the decoders or the hosts that are broken in some way, beside clients that send text alone."""

    falls: ClassVar[tuple[type[Exception], ...]] = (EngineStuck, StartFailed)
    broken: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.broken = self.rng.choice(BREAKS)

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        return shape(rng)

    async def live(self) -> None:
        system, rng = self.system, self.rng
        hosts = dict(system.hosts)
        self.faults.pictures.happened.add("anything")
        async with trio.open_nursery() as nursery:
            for number in range(system.costs.slots * system.workers):
                nursery.start_soon(self._stay, self.honest(f"h{number}"))
            for number in range(2):
                nursery.start_soon(self._send_pictures, self.honest(f"p{number}"))
            await trio.sleep(rng.random())
            self.note("broken", self.broken)
            await self._break(trio.current_time() + 2 + rng.random() * 4)
            nursery.cancel_scope.cancel()
        assert system.hosts == hosts, "an engine was restarted"
        system.media.heal()
        system.encoding.heal()
        await trio.sleep(2 * SOON_S)
        self.faults.pictures.happened.discard("anything")
        outcome, took_s = await self.honest("again").ask(TOKENS_MAX, content=own_picture("again", 0))
        assert outcome == "whole", f"what was broken does not heal: {outcome}"
        assert took_s <= 2 * SOON_S
        self.note("well again", took_s)

    async def _stay(self, client: HonestClient) -> None:
        costs = self.system.costs
        one_s = TOKENS_MAX * costs.step_s + costs.release_s
        while True:
            outcome, took_s = await client.ask(self.rng.randint(2, TOKENS_MAX))
            assert outcome == "whole", f"what is broken costs an answer without pictures: {outcome}"
            assert took_s <= 3 * one_s + SOON_S, f"what is broken keeps a client waiting for {took_s} s"

    async def _send_pictures(self, client: HonestClient) -> None:
        while True:
            await client.ask(TOKENS_MAX, content=own_picture(client.name, client.asked))
            await trio.sleep(0.1)

    async def _break(self, until: float) -> None:
        encoding, media = self.system.encoding, self.system.media
        engine = encoding.engines[0]
        match self.broken:
            case "crashes":
                while trio.current_time() < until:
                    await encoding.registrations[0].wait()
                    await trio.sleep(self.rng.random() * 0.2)
                    encoding.engines[0].crash()
                    await trio.sleep(0.01)
            case "stalls":
                engine.stall(inf)
            case "keeps its batches":
                engine.inject(Faults(stuck=1.0, slow=30.0))
            case "is slow":
                engine.inject(Faults(slow=100.0))
            case "makes wrong rows":
                encoding.costs.wrong = True
            case "does not start":
                encoding.starts_fail = True
                engine.crash()
            case "decoders":
                media.kill_decoders(until - trio.current_time())
            case _:
                media.hosts_stall_until = until
        await trio.sleep_until(until)


@define(eq=False)
class KillingPicture(SingleFault):
    """A picture that crashes every encoder which gets it, beside others in the same batches."""

    @staticmethod
    def shape(rng: random.Random) -> dict[str, object]:
        limits = FailoverLimits(resumes_max=20, crashes_max=1, resume_s=30.0)
        return shape(rng) | {"encoders": rng.choice((1, 2)), "route": limits}

    async def live(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(self._send_pictures, self.honest(f"p{number}"))
            for number in range(self.rng.choice((1, 2))):
                await trio.sleep(self.rng.random() * 2)
                killing = self.honest("killer")
                errors = frozenset({"engine_lost"})
                outcome, _ = await killing.ask(2, content=own_picture("killer", number, "kills"), errors=errors)
                assert outcome == "engine_lost"
            await trio.sleep(self.rng.random())
            nursery.cancel_scope.cancel()

    async def _send_pictures(self, client: HonestClient) -> None:
        while True:
            shared = Picture(self.rng.choice(SHARED), 4, 6)
            content = (shared, *own_picture(client.name, client.asked))
            outcome, _ = await client.ask(self.rng.randint(1, TOKENS_MAX), content=content)
            assert outcome == "whole", f"a picture that crashes encoders costs an answer about another: {outcome}"
