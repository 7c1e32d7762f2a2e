"""The description of a TensorRT-LLM engine."""

from __future__ import annotations

from typing import TypeAlias

from attrs import Factory, frozen

from actors.engines.adapter_files import AdapterLimits
from protocol.messages.cluster import Leg

TrtllmSetting: TypeAlias = str | int | float | bool | list[str | int] | None


@frozen
class TrtllmSpec:
    """The host of an engine, as the operator described the engine; sizes in tokens."""

    name: str
    model_path: str
    slots: int
    kv_tokens_max: int
    context_max: int | None = None
    page_size: int = 32
    tensor_parallel: int = 1
    data_parallel: int = 1  # ranks that requests name, each with so many slots and so much KV memory
    memory_fraction: float | None = None  # share of the free memory of a GPU for KV memory
    prefill_chunk: int | None = None  # the longest piece of a prompt computed in one step
    leg: Leg = Leg.BOTH
    transfer: str = "DEFAULT"  # how KV caches move from a prefill to a decode
    has_tower: bool = True  # whether an engine's images are pixels; without a tower they are embeddings
    batch_max: int = 1  # items of an encoder's batch
    publishes: bool = False  # whether it reports the blocks of its KV memory
    releases_memory: bool = False  # whether its GPU memory can be released by tag
    adapters: AdapterLimits | None = None  # None: it takes no adapters
    settings: dict[str, TrtllmSetting] = Factory(dict)  # the arguments of `LLM`, unchanged
    environment: dict[str, str] = Factory(dict)
