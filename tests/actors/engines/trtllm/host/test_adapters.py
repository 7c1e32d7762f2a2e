"""How TensorRT-LLM is made to load an adapter, and what follows from each way in which it may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, field

from actors.engines.trtllm.host.adapters import TrtllmAdapterLoader
from protocol.errors import EngineRefused, InternalError, NotReady
from tests.rig.fake_tensorrt_llm.tensorrt_llm._types import LoRARequest, RequestError, SamplingParams


@define
class Engine:
    """An engine whose requests for a token end, or fail."""

    error: Exception | None = None
    takes_requests: bool = True
    asked: list[dict[str, Any]] = field(factory=list)
    ends: list[str] = field(factory=list)

    def generate_async(self, **arguments: Any) -> Engine:
        self.asked.append(arguments)
        return self

    def __aiter__(self) -> Engine:
        return self

    async def __anext__(self) -> Engine:
        raise self.error or StopAsyncIteration


def adapters(engine: Engine) -> TrtllmAdapterLoader:
    names = SimpleNamespace(lora_request=LoRARequest, sampling_params=SamplingParams, request_error=RequestError)
    return TrtllmAdapterLoader(
        cast("Any", engine), cast("Any", names), engine.ends.append, lambda: engine.takes_requests
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_each_load_has_a_number_of_its_own_also_of_the_same_files(tmp_path: Any) -> None:
    engine = Engine()
    loaded, found = adapters(engine), []
    for name in ("one", "two", "one"):
        run(loaded.load(name, str(tmp_path)))
        found.append(loaded.lora_request(name))
        if name == "two":
            run(loaded.unload("one"))
    assert [cast("Any", each).lora_int_id for each in found] == [1, 2, 3]
    assert [each["lora_request"] for each in engine.asked] == found, "it is loaded before a request may name it"
    assert [each["sampling_params"].max_tokens for each in engine.asked] == [1, 1, 1]
    assert loaded.lora_request("one") is found[2]


def test_a_folder_that_is_gone_is_refused_before_the_engine_is_asked(tmp_path: Any) -> None:
    engine = Engine()
    with pytest.raises(EngineRefused, match=r"did not load the adapter: lora_path .* does not exist"):
        run(adapters(engine).load("one", str(tmp_path / "gone")))
    assert not engine.asked


@pytest.mark.parametrize("error", [RequestError("Failed to load LoRA adapter: no"), ValueError("no")])
def test_an_adapter_that_the_engine_refuses_costs_nothing_else(error: Exception, tmp_path: Any) -> None:
    engine = Engine(error)
    loaded = adapters(engine)
    with pytest.raises(EngineRefused, match=r"did not load the adapter: .*no"):
        run(loaded.load("one", str(tmp_path)))
    assert not engine.ends
    with pytest.raises(KeyError):
        loaded.lora_request("one")


def test_an_engine_whose_memory_is_released_is_asked_for_no_token(tmp_path: Any) -> None:
    engine = Engine(takes_requests=False)
    with pytest.raises(NotReady):
        run(adapters(engine).load("one", str(tmp_path)))
    assert not engine.asked


def test_an_adapter_counts_as_loading_while_its_request_is_in_the_engine(tmp_path: Any) -> None:
    class Watching(Engine):
        async def __anext__(self) -> Engine:
            assert loaded.loading == {1}
            raise StopAsyncIteration

    loaded = adapters(Watching())
    run(loaded.load("one", str(tmp_path)))
    assert not loaded.loading


def test_after_any_other_error_the_engine_is_ended(tmp_path: Any) -> None:
    engine = Engine(RuntimeError("CUDA error"))
    with pytest.raises(InternalError):
        run(adapters(engine).load("one", str(tmp_path)))
    (reason,) = engine.ends
    assert "CUDA error" in reason
