"""SGLang behind the engine port: what is asked about an engine leaves its host's streams to requests."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
from attrs import define

from actors._kit import Answer
from actors.engines.sglang.adapter import CONTROLS_MAX, SglangEngine
from protocol.messages import EngineLoad


@define(eq=False)
class Slow:
    """A link to a host that takes a second for each answer."""

    open: int = 0
    most: int = 0

    @asynccontextmanager
    async def ask(self, request, credit):
        self.open += 1
        self.most = max(self.most, self.open)
        answer = Answer(credit)
        await trio.sleep(1)
        answer.end(EngineLoad(0, 0, 0))
        try:
            yield answer
        finally:
            self.open -= 1


async def test_however_many_ask_for_its_load_few_streams_are_taken_and_all_are_answered(autojump_clock):
    link, loads = Slow(), []

    async def look(engine):
        loads.append(await engine.load())

    async with trio.open_nursery() as nursery:
        engine = SglangEngine(link, None)
        for _ in range(100):
            nursery.start_soon(look, engine)
    assert (link.most, len(loads)) == (CONTROLS_MAX, 100)
