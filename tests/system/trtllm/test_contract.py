"""The engine contract on TensorRT-LLM's kind: a real host process, with the recorded fake as its package."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from attrs import evolve

from actors.engines.adapter_files import AdapterLimits
from actors.engines.port import Engine
from actors.engines.trtllm.adapter_arguments import adapter_bounds
from tests.contracts.engine import check_engine
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime


@pytest.mark.parametrize("adapters", [None, AdapterLimits(bounds=adapter_bounds(8, ("all",)), loaded_max=2)])
async def test_trtllm_keeps_the_contract(adapters: AdapterLimits | None) -> None:
    async with trtllm_engine(evolve(SPEC, adapters=adapters, releases_memory=True)) as engines:
        engine = engines.current
        assert engine is not None
        assert "release-memory" in engine.info.operations
        assert (engine.info.kind, engine.info.version) == ("trtllm", "1.3.0rc29")

        @asynccontextmanager
        async def same() -> AsyncIterator[Engine]:
            yield engine

        await check_engine(same)
