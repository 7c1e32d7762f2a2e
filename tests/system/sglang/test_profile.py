"""Profiles of the real engine: what the file has in it, their limits, and refusals that the engine outlives."""

from __future__ import annotations

import json
from typing import Any
from zlib import decompress

import pytest
import trio
from attrs import evolve

from protocol.errors import BadRequest, Overloaded
from protocol.messages.profile import Activity, Profiled, ProfileEnd, StartProfile, StopProfile
from tests.contracts import profile
from tests.contracts.engine import complete, request
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

GZIP = 31


def crossing(events: list[dict[str, Any]]) -> list[str]:
    """Return the spans that begin inside another one of their thread and end after it: no reader could show them."""
    threads: dict[tuple[object, object], list[tuple[float, float, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
    wrong = list[str]()
    for spans in threads.values():
        ends = list[float]()
        for begins, less, name in sorted(spans):
            while ends and ends[-1] <= begins:
                ends.pop()
            if ends and begins - less > ends[-1] + ROUNDED_US:
                wrong.append(name)
            ends.append(begins - less)
    return wrong


ROUNDED_US = 1.0


@pytest.mark.nightly
async def test_each_rank_of_an_engine_leaves_a_file(make_engine: MakeEngine) -> None:
    async with make_engine(data_parallel=2, slots=4) as engine:
        await engine.operate(StartProfile(steps=2))
        for rank in (0, 1):
            await complete(engine, evolve(request(engine, 8), rank=rank))
        ended = await engine.operate(StopProfile())
        assert isinstance(ended, Profiled)
        assert ended.ended is ProfileEnd.STEPS
        assert [name.rpartition("DP-")[2][:1] for name in ended.files] == ["0", "1"]
        await complete(engine, request(engine, 4))


@pytest.mark.nightly
async def test_a_profile_has_the_steps_of_the_scheduler_and_ends_at_its_limits(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for check in profile.CHECKS:
            await check(engine)
        with pytest.raises(BadRequest, match="no gpu, only cpu"):
            await engine.operate(StartProfile(activities=(Activity.GPU,)))

        await engine.operate(StartProfile(steps=3, record_shapes=True))
        await complete(engine, request(engine, 8))
        ended = await engine.operate(StopProfile())
        assert isinstance(ended, Profiled)
        (name,) = ended.files
        events = json.loads(decompress(await profile.read_file(engine, name), GZIP))["traceEvents"]
        steps = [event["name"] for event in events if str(event.get("name")).startswith("step[")]
        assert len(steps) == 3
        assert not crossing(events)
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
                    await engine.operate(StartProfile(with_stack=True))
                except Overloaded as error:
                    refused.append(error)

            nursery.start_soon(start)
            nursery.start_soon(start)
        assert len(refused) == 1
        await engine.operate(StopProfile())
        await complete(engine, request(engine, 4))
