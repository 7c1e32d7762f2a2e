"""Calls go by direct addresses or through inboxes (decision 14): clients cannot tell which.

The two ways take different numbers of tasks, and so of the draws that order these. What must be equal is all that a client
gets, where that order decides nothing: each client has draws of its own and comes at a time of its own, the network is good,
and an answer has one choice, since the choices of an answer take turns.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import trio
from attrs import define

from actors.kit.direct import DirectCalls
from tests.rig.fake_engine import Costs
from tests.rig.gateway import Client, post
from tests.rig.scheduler import simulate
from tests.rig.small_system import living
from tests.system.simulator.clients import GONE, chat
from tests.system.simulator.model import VOCABULARY, PlannedRequest, draw
from tests.system.simulator.system import System

SEEDS = (1, 2, 3)
CLIENTS = 10
LONGEST_S = 200.0


@define(eq=False)
class RecordingClient(Client):
    """A client that keeps all that it has received."""

    received: bytes = b""

    async def more(self) -> bool:
        before = len(self.buffer)
        is_more = await Client.more(self)
        self.received += self.buffer[before:]
        return is_more


async def converse(system: System, seed: int, number: int, received: dict[str, bytes]) -> None:
    """Send a few requests over one connection, or leave it in the middle of one, and keep what has come by then."""
    rng, name = random.Random(f"{seed} {number}"), f"c{number}"
    await trio.sleep(rng.random() * 3)
    client = RecordingClient(system.connect())
    with trio.move_on_after(rng.random() if rng.random() < 0.3 else LONGEST_S) as patience, suppress(*GONE):
        for request in range(rng.randint(1, 3)):
            wanted = draw(rng, f"{name}.{request}")
            if rng.random() < 0.3:
                await client.ask(post(response(wanted), "/v1/responses"))
            else:
                await client.ask(post(chat(wanted)))
            await trio.sleep(rng.random())
    received[name] = client.received
    assert patience.cancelled_caught or client.received
    client.stream.socket.close()


def response(wanted: PlannedRequest) -> dict[str, object]:
    """Return the body of a response."""
    return {
        "model": "tiny",
        "input": wanted.turns[-1][1],
        "max_output_tokens": wanted.tokens_max,
        "stream": wanted.stream,
        "store": False,
    }


def answers(seed: int, *, direct: bool) -> dict[str, bytes]:
    """Return all that each client receives under a seed."""
    received: dict[str, bytes] = {}

    async def scenario(rng: random.Random) -> None:
        system = System(
            rng=rng,
            workers=rng.choice((1, 2)),
            costs=Costs(slots=rng.randint(1, 3), step_s=rng.choice((0.02, 0.05, 0.1)), vocabulary_size=VOCABULARY),
            inbox_size=rng.randint(0, 3),
            far=rng.random() < 0.5,
            network={"delay_s": 0.0, "piece_max": 65536, "room": 65536},
            requests_max=rng.choice((3, 16)),
            admit_s=LONGEST_S,
            total_s=LONGEST_S,
            waiting_max=16,
            direct=direct,
        )
        async with living(system):
            async with trio.open_nursery() as nursery:
                for number in range(CLIENTS):
                    nursery.start_soon(converse, system, seed, number, received)
            await trio.sleep(LONGEST_S)
            await system.check_at_rest()

    simulate(scenario, seed)
    return received


@pytest.mark.parametrize("seed", SEEDS)
def test_each_client_gets_the_same_bytes_with_direct_addresses_and_without(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    run = DirectCalls.run

    async def count(self: DirectCalls[Any, Any, Any], *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        await run(self, *arguments)

    monkeypatch.setattr(DirectCalls, "run", count)
    usual = answers(seed, direct=True)
    assert calls, "some calls are answered directly; others wait for room"
    assert b"".join(usual.values()).count(b"HTTP/1.1 200 OK") >= CLIENTS // 2
    calls = 0
    assert answers(seed, direct=False) == usual
    assert calls == 0


@pytest.mark.parametrize("direct", [True, False])
def test_an_answer_of_another_node_may_outlast_the_deadline_of_its_first_token(*, direct: bool) -> None:
    async def scenario(rng: random.Random) -> None:
        costs = Costs(step_s=0.1, vocabulary_size=VOCABULARY)
        system = System(rng=rng, workers=1, costs=costs, far=True, first_token_s=3.0, total_s=60.0, direct=direct)
        async with living(system):
            wanted = PlannedRequest(turns=(("user", "a"),), tokens_max=60, stream=False)
            client = Client(system.connect())
            reply = await client.ask(post(response(wanted), "/v1/responses"))
            assert (reply.status, round(trio.current_time())) == (200, 6)
            client.stream.socket.close()

    simulate(scenario, 1)
