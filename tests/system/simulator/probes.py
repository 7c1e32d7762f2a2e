"""Checks of a system without faults."""

from __future__ import annotations

import json

import trio

from tests.rig.gateway import head, post
from tests.system.simulator import judge
from tests.system.simulator.clients import Reader, chat
from tests.system.simulator.lanes import Transcript, create
from tests.system.simulator.model import Wanted
from tests.system.simulator.system import System


def _wanted(number: int, tokens: int = 20) -> Wanted:
    return Wanted(turns=(("user", f"probe {number}"),), tokens_max=tokens)


def _never(_: str) -> bool:
    return False


async def health(system: System) -> None:
    """Check that `/health` answers."""
    heard = judge.Heard()
    reader = Reader(system.connect())
    await reader.send(head())
    await reader.hear(heard)
    assert heard.status == 200
    await reader.leave("close")


async def each_alone(system: System, count: int, tokens: int = 20) -> None:
    """Get so many answers at once, each over a connection of its own."""

    async def one(wanted: Wanted) -> None:
        heard = judge.Heard()
        reader = Reader(system.connect())
        await reader.send(post(chat(wanted)))
        await reader.hear(heard)
        assert judge.http(wanted, heard, _never, stayed=True) == "whole"
        await reader.leave("close")

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, _wanted(number, tokens))


async def in_lanes(system: System, count: int) -> None:
    """Get so many answers at once, each in a lane of one connection."""
    transcript = Transcript(_never)
    reader = Reader(system.connect())
    assert (await reader.upgrade()).status == 101
    for number in range(count):
        name, lane = f"p{number}", f"lane.{number}"
        transcript.asked[name] = _wanted(number), lane
        await reader.say(create(_wanted(number), name, lane))
    while transcript.open:
        first, payload = await reader.frame()
        assert first == 0x81
        transcript.hear(json.loads(payload))
    await reader.leave("close")
