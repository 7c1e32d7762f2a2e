"""Profiles of the real engine: what the file has in it, their limits, and refusals that the engine outlives."""

from __future__ import annotations

import json
from zlib import decompress

import pytest
import trio

from protocol.errors import BadRequest, Overloaded
from protocol.messages.profile import Activity, Profiled, ProfileEnd, StartProfile, StopProfile
from tests.contracts import profile
from tests.contracts.engine import complete, request
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

GZIP = 31


async def test_a_profile_has_the_steps_of_the_scheduler_and_ends_at_its_limits(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for check in profile.CHECKS:
            await check(engine)
        with pytest.raises(BadRequest, match="no gpu, only cpu"):
            await engine.operate(StartProfile(activities=(Activity.GPU,)))

        await engine.operate(StartProfile(steps=3, with_stack=True, record_shapes=True))
        await complete(engine, request(engine, 8))
        ended = await engine.operate(StopProfile())
        assert isinstance(ended, Profiled)
        (name,) = ended.files
        events = json.loads(decompress(await profile.read_file(engine, name), GZIP))["traceEvents"]
        steps = [event["name"] for event in events if str(event.get("name")).startswith("step[")]
        assert len(steps) == 3
        assert any("Input Dims" in event.get("args", {}) for event in events)

        await engine.operate(StartProfile(seconds=0.2))  # an idle engine does no steps
        await trio.sleep(1.5)
        ended = await engine.operate(StopProfile())
        assert isinstance(ended, Profiled)
        assert (ended.ended, len(ended.files)) == (ProfileEnd.SECONDS, 1)

        async with trio.open_nursery() as nursery:  # one of two that start at once
            refused = list[Overloaded]()

            async def start() -> None:
                try:
                    await engine.operate(StartProfile())
                except Overloaded as error:
                    refused.append(error)

            nursery.start_soon(start)
            nursery.start_soon(start)
        assert len(refused) == 1
        await engine.operate(StopProfile())
        await complete(engine, request(engine, 4))
