"""LoRA adapters on SGLang itself: loaded at the start and in life, apart in tokens and in caches, and gone when unloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from attrs import evolve

from actors.engines.port import Engine
from actors.engines.sglang.spec import AdapterLimits
from protocol.block_hashes import block_hashes
from protocol.errors import BadRequest
from protocol.messages.adapters import Adapter, LoadAdapter, UnloadAdapter
from protocol.messages.kv_events import BlockEvents
from tests.contracts.engine import ADAPTER_CHECKS, at_rest, complete, new_id, request, serves_on
from tests.rig.adapters import MODULES, adapter_shapes, tiny_adapter, write_adapter
from tests.system.sglang.conftest import MakeEngine

pytestmark = pytest.mark.engine

LIMITS = AdapterLimits(rank_max=8, modules=("all",), loaded_max=3, active_max=3)


async def test_sglang_keeps_the_contract_of_adapters(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The engine's process is one and the same through all refusals."""
    limits = evolve(LIMITS, folders={"first": tiny_adapter(3)})
    async with make_engine(adapters=limits, publishes=True) as engine:
        (first,) = engine.info.adapters
        plain = request(engine, 12)
        usual, _ = await complete(engine, plain)
        changed, _ = await complete(engine, evolve(plain, id=new_id(), adapter=first))
        assert changed != usual
        await publishes_blocks_by_which_routers_find_them(engine, first)
        await engine.operate(UnloadAdapter("first"))
        for check in ADAPTER_CHECKS:
            await check(engine)
            await at_rest(engine)
        await refuses_files_that_would_end_its_scheduler(engine, tmp_path)


async def publishes_blocks_by_which_routers_find_them(engine: Engine, adapter: Adapter) -> None:
    plain = request(engine, 2, prompt=4 * engine.info.page_size)
    asked = evolve(plain, adapter=adapter)
    stored, came = set[int](), trio.Event()
    wanted = block_hashes(asked.tokens, engine.info.page_size, asked.cache_namespace)

    def receive(events: BlockEvents) -> None:
        for event in events.events:
            assert event.lora is None
            stored.update(event.hashes)
        if stored.issuperset(wanted):
            came.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_blocks, receive)
        await complete(engine, asked)
        with trio.fail_after(10):
            await came.wait()
        nursery.cancel_scope.cancel(reason="they have come")
    assert stored.isdisjoint(block_hashes(asked.tokens, engine.info.page_size))


async def refuses_files_that_would_end_its_scheduler(engine: Engine, folder: Path) -> None:
    shapes = adapter_shapes()
    wrong = next(name for name in shapes if "down_proj.lora_A" in name)
    for number, made in enumerate(
        (
            write_adapter(folder / "rank", rank=16),
            write_adapter(folder / "shape", shapes=shapes | {wrong: (4, 8)}),
            write_adapter(
                folder / "layer", shapes={name.replace("layers.0", "layers.9"): s for name, s in shapes.items()}
            ),
            write_adapter(folder / "half", modules=("k_proj",)),
            folder / "nowhere",
        )
    ):
        with pytest.raises(BadRequest, match="is no adapter for this engine"):
            await engine.operate(LoadAdapter(f"wrong-{number}", str(made)))
        await serves_on(engine)
    assert engine.info.adapters == ()
    assert MODULES  # all of them are adapted by the right ones
