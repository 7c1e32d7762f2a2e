"""Requests with tensors reach a real engine's process, in either way, and one that it cannot take fails alone."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

from actors.engines.hosted_engine import HostedEngine
from actors.engines.shared_tensors import SHARED_BYTES_MIN
from protocol.errors import EngineRefused, RequestError
from protocol.messages.generation import Finished, Generate, Sampling
from protocol.messages.media import Encode
from protocol.token_ids import TokenIds
from tests.rig.tensors import pixels
from tests.system.sglang.conftest import MakeEngine

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


async def refused(engine: HostedEngine, size: int) -> RequestError:
    async with engine.link.ask(Encode("0" * 32, pixels(size)), 0) as answer:
        with pytest.raises(EngineRefused) as caught:
            await answer.result()
    return caught.value


async def test_an_engine_outlives_requests_whose_tensors_it_cannot_take(make_engine: MakeEngine) -> None:
    made: AbstractAsyncContextManager[Any] = make_engine()
    async with made as engine:
        assert isinstance(engine, HostedEngine)
        for number, size in enumerate((12, SHARED_BYTES_MIN - 1, 3 * SHARED_BYTES_MIN, 60 * SHARED_BYTES_MIN)):
            with trio.fail_after(60):
                assert "has no Encode" in (await refused(engine, size)).detail
                generation = engine.submit(
                    Generate(f"{number:032x}", TokenIds.of([1, 2, 3]), Sampling(4, ignore_eos=True))
                )
                assert isinstance(await generation.result(), Finished)
