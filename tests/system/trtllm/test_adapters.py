"""LoRA adapters on TensorRT-LLM's kind: a real host process, with the recorded fake as its package."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree

import pytest
import trio
from attrs import evolve

from actors.engines.adapter_files import AdapterLimits
from actors.engines.port import Engine
from actors.engines.trtllm.adapter_arguments import adapter_bounds
from protocol.block_hashes import block_hashes
from protocol.errors import BadRequest, NotReady, StartFailed
from protocol.messages.adapters import Adapter, AdapterList, ListAdapters, LoadAdapter, UnloadAdapter
from protocol.messages.kv_events import BlockEvents
from protocol.messages.leaving import MemoryTag
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from supervisor.supervision.registration import Registration
from tests.contracts.engine import ADAPTER_CHECKS, at_rest, complete, loaded_adapter, new_id, request, serves_on, slot
from tests.rig.adapters import MODULES, tiny_adapter, write_adapter
from tests.rig.trtllm_engines import SPEC, trtllm_engine

pytestmark = pytest.mark.realtime

LIMITS = AdapterLimits(bounds=adapter_bounds(8, ("all",)), loaded_max=3)
WITH_ADAPTERS = evolve(SPEC, adapters=LIMITS, publishes=True)
FOUND_WITHIN_S = 10.0


async def test_the_contract_of_adapters_holds_through_all_refusals(tmp_path: Path) -> None:
    """The engine's process is one and the same."""
    spec = evolve(WITH_ADAPTERS, adapters=evolve(LIMITS, folders={"first": tiny_adapter(3)}))
    async with trtllm_engine(spec) as engines:
        engine = engines.current
        assert engine is not None
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
        await refuses_files_that_it_does_not_read(engine, tmp_path)


async def publishes_blocks_by_which_routers_find_them(engine: Engine, adapter: Adapter) -> None:
    asked = evolve(request(engine, 2, prompt=4 * engine.info.page_size), adapter=adapter)
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
        with trio.fail_after(FOUND_WITHIN_S):
            await came.wait()
        nursery.cancel_scope.cancel(reason="they have come")
    assert stored.isdisjoint(block_hashes(asked.tokens, engine.info.page_size))


async def refuses_files_that_it_does_not_read(engine: Engine, folder: Path) -> None:
    renamed = write_adapter(folder / "name")
    (renamed / "adapter_model.safetensors").rename(renamed / "weights.safetensors")
    for number, made in enumerate(
        (write_adapter(folder / "rank", rank=16), write_adapter(folder / "half", modules=("k_proj",)), renamed)
    ):
        with pytest.raises(BadRequest, match="is no adapter for this engine"):
            await engine.operate(LoadAdapter(f"wrong-{number}", str(made)))
        await serves_on(engine)
    assert engine.info.adapters == ()


async def test_an_adapter_may_change_no_layer_that_the_engine_has_no_place_for(tmp_path: Path) -> None:
    few = evolve(LIMITS, bounds=adapter_bounds(8, ("q_proj",)))
    async with trtllm_engine(evolve(SPEC, adapters=few)) as engines:
        engine = engines.current
        assert engine is not None
        with pytest.raises(BadRequest, match=r"it adapts down_proj, .*, and target_modules are q_proj, k_proj, v_proj"):
            await engine.operate(LoadAdapter("one", tiny_adapter(1)))
        attention = write_adapter(tmp_path / "few", modules=MODULES[:3])
        await engine.operate(LoadAdapter("one", str(attention)))


async def test_files_are_read_when_an_adapter_is_loaded_and_a_new_life_of_a_name_has_no_blocks_of_the_last(
    tmp_path: Path,
) -> None:
    """The same files under the same name: their blocks have the same hashes, and the engine keeps them apart."""
    async with trtllm_engine(WITH_ADAPTERS) as engines:
        engine = engines.current
        assert engine is not None
        folder = write_adapter(tmp_path / "one", 1)
        plain = request(engine, 12, prompt=4 * engine.info.page_size)
        listed = await engine.operate(LoadAdapter("one", str(folder)))
        assert isinstance(listed, AdapterList)
        one = Adapter("one", listed.adapters[0].digest)
        rmtree(folder)
        asked = evolve(plain, adapter=one)
        first, _ = await complete(engine, asked)
        _, finished = await complete(engine, evolve(asked, id=new_id()))
        assert finished.usage.cached_tokens > 0
        await engine.operate(UnloadAdapter("one"))
        await engine.operate(LoadAdapter("one", str(write_adapter(folder, 1))))
        again, finished = await complete(engine, evolve(asked, id=new_id()))
        assert (again, finished.usage.cached_tokens) == (first, 0)


async def test_an_adapter_is_counted_until_the_engine_has_ended_its_request() -> None:
    async with trtllm_engine(WITH_ADAPTERS) as engines:
        engine = engines.current
        assert engine is not None
        one = await loaded_adapter(engine, "one", 1)
        asked = evolve(request(engine, 400), adapter=one)
        async with slot(engine, asked) as answer:
            await anext(answer)
            listed = await engine.operate(ListAdapters())
            assert isinstance(listed, AdapterList)
            assert [each.requests for each in listed.adapters] == [1]
        await at_rest(engine)
        listed = await engine.operate(ListAdapters())
        assert isinstance(listed, AdapterList)
        assert [each.requests for each in listed.adapters] == [0]


async def test_no_adapter_is_loaded_while_memory_is_released() -> None:
    """The engine would end by the request for a token."""
    async with trtllm_engine(evolve(WITH_ADAPTERS, releases_memory=True)) as engines:
        engine = engines.current
        assert engine is not None
        await engine.operate(ReleaseMemory(tags=(MemoryTag.KV_CACHE,)))
        with pytest.raises(NotReady, match="released"):
            await engine.operate(LoadAdapter("one", tiny_adapter(1)))
        await engine.operate(ResumeMemory())
        one = await loaded_adapter(engine, "one", 1)
        await complete(engine, evolve(request(engine), adapter=one))


async def test_the_next_life_of_an_engine_has_the_adapters_of_the_last(tmp_path: Path) -> None:
    """An adapter whose files are gone since costs nothing but itself."""
    engines = Registration[Engine]()
    spec = evolve(SPEC, adapters=evolve(LIMITS, folders={"first": tiny_adapter(3)}))
    async with trtllm_engine(spec, engines):
        engine = engines.current
        assert engine is not None
        await engine.operate(UnloadAdapter("first"))
        for name in ("late", "gone"):
            await engine.operate(LoadAdapter(name, str(write_adapter(tmp_path / name, 5))))
    rmtree(tmp_path / "gone")
    async with trtllm_engine(spec, engines):
        engine = engines.current
        assert engine is not None
        (late,) = engine.info.adapters
        assert late.name == "late"
        await complete(engine, evolve(request(engine), adapter=late))


@pytest.mark.parametrize(
    ("folder", "version", "why"),
    [
        ("/nowhere", "1.3.0rc29", "adapter first in /nowhere: there is no folder /nowhere"),
        (tiny_adapter(1), "1.0.0", "TensorRT-LLM 1.0.0 cannot keep the cached prompts of adapters apart"),
    ],
)
async def test_an_engine_starts_with_its_first_adapters_or_not_at_all(folder: str, version: str, why: str) -> None:
    spec = evolve(SPEC, adapters=evolve(LIMITS, folders={"first": folder}))
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailed, match=why), allow_unwrapped=True, flatten_subgroups=True):
        async with trtllm_engine(spec, ESPALIER_FAKE_TRTLLM_VERSION=version):
            pass


async def test_an_engine_that_refuses_a_first_adapter_does_not_start() -> None:
    """A rank that the engine itself has no place for, as a setting can make it."""
    spec = evolve(
        SPEC,
        adapters=evolve(LIMITS, folders={"first": tiny_adapter(1)}),
        settings={"lora_config.max_lora_rank": 2},
    )
    with pytest.RaisesGroup(
        pytest.RaisesExc(StartFailed, match="TensorRT-LLM did not load the adapter: .*Invalid low_rank"),
        allow_unwrapped=True,
        flatten_subgroups=True,
    ):
        async with trtllm_engine(spec):
            pass
