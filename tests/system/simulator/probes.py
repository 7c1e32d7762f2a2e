"""Checks of a system without faults."""

from __future__ import annotations

import json

import trio

from tests.rig.gateway import head, post
from tests.system.simulator import judge
from tests.system.simulator.clients import Reader, chat
from tests.system.simulator.lanes import Transcript, create
from tests.system.simulator.model import PlannedRequest
from tests.system.simulator.system import System


def _request(number: int, tokens: int = 20) -> PlannedRequest:
    return PlannedRequest(turns=(("user", f"probe {number}"),), tokens_max=tokens)


def _none_allowed(_: str) -> bool:
    return False


async def health(system: System) -> None:
    """Check that `/health` answers."""
    received = judge.Received()
    reader = Reader(system.connect())
    await reader.send(head())
    await reader.read_answer(received)
    assert received.status == 200
    await reader.leave("close")


async def each_alone(system: System, count: int, tokens: int = 20) -> None:
    """Check so many concurrent answers, each over a connection of its own."""

    async def probe(request: PlannedRequest) -> None:
        received = judge.Received()
        reader = Reader(system.connect())
        await reader.send(post(chat(request)))
        await reader.read_answer(received)
        assert judge.http(request, received, _none_allowed, stayed=True) == "whole"
        await reader.leave("close")

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(probe, _request(number, tokens))


async def in_lanes(system: System, count: int) -> None:
    """Check so many concurrent answers, each in a lane of one connection."""
    transcript = Transcript(_none_allowed)
    reader = Reader(system.connect())
    assert (await reader.upgrade()).status == 101
    for number in range(count):
        name, lane = f"p{number}", f"lane.{number}"
        transcript.asked[name] = _request(number), lane
        await reader.say(create(_request(number), name, lane))
    while transcript.open:
        first, payload = await reader.frame()
        assert first == 0x81
        transcript.judge_event(json.loads(payload))
    await reader.leave("close")
