"""Checks of a system without faults."""

from __future__ import annotations

import json

import trio

from actors.routing.candidates import Candidates, Choice
from actors.routing.outliers import OutlierDetector
from actors.routing.policies.least_loaded import least_loaded
from protocol.messages.generation import Generate
from tests.rig.gateway import head, post
from tests.system.simulator import judge
from tests.system.simulator.clients import Reader, chat
from tests.system.simulator.lanes import Transcript, create
from tests.system.simulator.model import PlannedRequest
from tests.system.simulator.pictures import Content, Picture
from tests.system.simulator.system import System


def _request(system: System, number: int, tokens: int = 20) -> PlannedRequest:
    text, pictures = f"probe {number}", number % 3 if system.sighted else 0
    content: Content = text
    if pictures:
        content = (*(Picture(f"probe-{number}-{which}", 4, 2 + 2 * which) for which in range(pictures)), text)
    return PlannedRequest(turns=(("user", content),), tokens_max=tokens)


def choose_ejected(outliers: OutlierDetector, request: Generate, candidates: Candidates, /) -> Choice | None:
    """Return a worker that may be probed, if there is one; else the least loaded."""
    ejected = {ejection.name for ejection in outliers.ejected(trio.current_time())}
    probed = next((load for load in candidates if load.name in ejected), None)
    return least_loaded(request, candidates) if probed is None else Choice(probed)


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


async def each_alone(system: System, count: int, tokens: int = 20, first: int = 0) -> None:
    """Check so many concurrent answers, each over a connection of its own; two of three probes have pictures."""

    async def probe(request: PlannedRequest) -> None:
        received = judge.Received()
        reader = Reader(system.connect())
        await reader.send(post(chat(request)))
        await reader.read_answer(received)
        assert judge.http(request, received, _none_allowed, stayed=True) == "whole"
        await reader.leave("close")

    async with trio.open_nursery() as nursery:
        for number in range(first, first + count):
            nursery.start_soon(probe, _request(system, number, tokens))


async def in_lanes(system: System, count: int) -> None:
    """Check so many concurrent answers, each in a lane of one connection."""
    transcript = Transcript(_none_allowed)
    reader = Reader(system.connect())
    assert (await reader.upgrade()).status == 101
    for number in range(count):
        name, lane = f"p{number}", f"lane.{number}"
        transcript.asked[name] = _request(system, number), lane
        await reader.say(create(transcript.asked[name][0], name, lane))
    while transcript.open:
        first, payload = await reader.frame()
        assert first == 0x81
        transcript.judge_event(json.loads(payload))
    await reader.leave("close")
