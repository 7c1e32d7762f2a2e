"""What a request leaves is freed by reference counts: none of it waits for the garbage collector.

A collection that finds such cycles examines all that lives, in which time no token is sent.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from tests.rig.fake_engine import Costs
from tests.rig.gateway import Client, create, post
from tests.rig.scheduler import simulate
from tests.rig.small_system import living
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.system import System

REQUESTS = 12
ROOMS = ("actors.", "protocol.", "supervisor.")


@contextmanager
def cycles() -> Iterator[Counter[str]]:
    """Count by their types the objects of the product that only the collector can free, while the body runs."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(name for name in names if name.startswith(ROOMS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def chat(client: Client, stream: bool) -> None:
    for number in range(REQUESTS):
        turns = [{"role": "user", "content": f"n={number}"}]
        await client.ask(post({"model": "tiny", "messages": turns, "max_tokens": 8, "stream": stream}))


async def respond(client: Client) -> None:
    await client.upgrade()
    for _ in range(REQUESTS):
        await client.say(create(model="tiny", max_output_tokens=8, store=False))
        await client.events("response.completed", "response.incomplete")


def left_over(way: str, *, direct: bool) -> Counter[str]:
    """Return what only the collector frees after some requests of one client that stays."""
    counts: list[Counter[str]] = []

    async def scenario(rng: random.Random) -> None:
        system = System(
            rng=rng,
            workers=1,
            costs=Costs(slots=4, step_s=0.05, vocabulary_size=VOCABULARY),
            far=True,
            network={"delay_s": 0.0, "piece_max": 65536, "room": 65536},
            direct=direct,
        )
        async with living(system):
            client = Client(system.connect())
            with cycles() as found:
                await (respond(client) if way == "responses-ws" else chat(client, way == "chat, streamed"))
                await trio.sleep(10)
            counts.append(found)
            client.stream.socket.close()
            await trio.sleep(10)

    simulate(scenario, 1)
    return counts[0]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "inbox"])
@pytest.mark.parametrize("way", ["chat", "chat, streamed", "responses-ws"])
def test_nothing_of_answered_requests_waits_for_the_garbage_collector(way: str, direct: bool) -> None:
    found = left_over(way, direct=direct)
    assert {name: count for name, count in found.items() if count >= REQUESTS} == {}
