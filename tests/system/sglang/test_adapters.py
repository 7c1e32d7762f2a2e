"""LoRA adapters on SGLang itself: loaded at the start and in life, apart in tokens and in caches, and gone when unloaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
import trio
from attrs import evolve

from actors.engines.adapter_files import AdapterBounds, AdapterLimits
from actors.engines.port import Engine
from protocol.block_hashes import block_hashes
from protocol.errors import BadRequest
from protocol.messages.adapters import Adapter, LoadAdapter, UnloadAdapter
from protocol.messages.kv_events import BlockEvents
from supervisor.supervision.registration import Registration
from tests.contracts.engine import ADAPTER_CHECKS, at_rest, complete, new_id, request, serves_on
from tests.rig.adapters import MODULES, adapter_shapes, tiny_adapter, write_adapter
from tests.system.sglang.conftest import STARTED_WITHIN_S, KeepEngines, MakeEngine

pytestmark = pytest.mark.engine

LIMITS = AdapterLimits(bounds=AdapterBounds(8), loaded_max=3, active_max=3)


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


async def test_the_next_life_of_an_engine_has_the_adapters_of_the_last(
    keep_engines: KeepEngines, tmp_path: Path
) -> None:
    """An adapter whose files are gone since costs nothing but itself."""
    registration = Registration[Engine]()
    limits = evolve(LIMITS, folders={"first": tiny_adapter(3), "second": tiny_adapter(4)})
    async with keep_engines() as keep:
        for life in range(2):
            async with trio.open_nursery() as nursery:
                with trio.fail_after(STARTED_WITHIN_S):
                    await nursery.start(partial(keep, registration, adapters=limits))
                engine = registration.current
                assert engine is not None
                if life == 0:
                    for name in ("late", "gone"):
                        await engine.operate(UnloadAdapter({"late": "first", "gone": "second"}[name]))
                        await engine.operate(LoadAdapter(name, str(write_adapter(tmp_path / name, 5))))
                    rmtree(tmp_path / "gone")
                else:
                    (late,) = engine.info.adapters
                    assert late.name == "late"
                    await complete(engine, evolve(request(engine), adapter=late))
                nursery.cancel_scope.cancel(reason="this life is over")
