"""The boot message of a host: the arguments of `tensorrt_llm.LLM`, its environment, its folder.

A node never imports TensorRT-LLM, so all of its arguments are decided here. An operator's own `settings` come last, as
far as `setting_rules` allows them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from attrs import frozen

from actors.engines.adapter_files import AdapterLimits
from actors.engines.trtllm.adapter_arguments import lora_arguments
from actors.engines.trtllm.spec import TrtllmSetting, TrtllmSpec
from protocol.messages.cluster import Leg

PREFILL_CHUNK = 8192
"""The most prompt tokens of one step where the section names none."""

EVENTS_MAX = 65_536
"""The most events of KV memory that TensorRT-LLM keeps until its host takes them."""

LlmArguments: TypeAlias = dict[str, TrtllmSetting | dict[str, TrtllmSetting | dict[str, str]]]

RESTORE_MODES = {"kv_cache": "NONE"}
"""What of released memory is not copied: all else returns from host memory, by TensorRT-LLM's own default."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


@frozen
class TrtllmBoot:
    """The configuration of a host at its start, of an engine or an encoder; sizes in tokens."""

    name: str
    folder: str  # its own, as TMPDIR; removed when it has ended
    arguments: LlmArguments
    slots: int
    kv_tokens_max: int
    page_size: int
    data_parallel: int
    leg: Leg
    transfer: str
    has_tower: bool
    batch_max: int
    publishes: bool
    releases_memory: bool
    environment: dict[str, str]
    adapters: AdapterLimits | None = None

    @property
    def owns_weights(self) -> bool:
        """Whether its weights are in memory of its own, and not in that of the GPU Memory Service."""
        return str(self.arguments.get("load_format")).lower() != "gms"


def build(spec: TrtllmSpec, folder: str) -> TrtllmBoot:
    """Return the boot message of a host whose folder is `folder`."""
    return TrtllmBoot(
        name=spec.name,
        folder=folder,
        arguments={**_nested({**_arguments(spec), **spec.settings}), **_sleep(spec)},
        slots=spec.slots,
        kv_tokens_max=spec.kv_tokens_max,
        page_size=spec.page_size,
        data_parallel=spec.data_parallel,
        leg=spec.leg,
        transfer=spec.transfer,
        has_tower=spec.has_tower,
        batch_max=spec.batch_max,
        publishes=spec.publishes,
        releases_memory=spec.releases_memory,
        environment={**ENVIRONMENT, **spec.environment},
        adapters=spec.adapters,
    )


def _arguments(spec: TrtllmSpec) -> dict[str, TrtllmSetting]:
    if spec.leg is Leg.ENCODE:
        return {
            "model": spec.model_path,
            "tensor_parallel_size": spec.tensor_parallel,
            "max_batch_size": spec.batch_max,
        }
    given: dict[str, TrtllmSetting] = {
        "model": spec.model_path,
        "tensor_parallel_size": spec.tensor_parallel,
        # Its ranks of tensor parallelism then compute attention each for requests of its own.
        "enable_attention_dp": True if spec.data_parallel > 1 else None,
        "max_batch_size": spec.slots,  # of each rank, as are the numbers of tokens
        "max_seq_len": spec.context_max,
        "max_num_tokens": spec.prefill_chunk or PREFILL_CHUNK,
        "enable_chunked_prefill": True,  # else no prompt is longer than a step
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
        "kv_cache_config.max_tokens": spec.kv_tokens_max,
        "kv_cache_config.tokens_per_block": spec.page_size,
        "kv_cache_config.free_gpu_memory_fraction": spec.memory_fraction,
        "kv_cache_config.event_buffer_max_size": EVENTS_MAX if spec.publishes else None,
        "cache_transceiver_config.backend": None if spec.leg is Leg.BOTH else spec.transfer,
        # TensorRT-LLM's own demand on an engine that computes prompts for others.
        "disable_overlap_scheduler": True if spec.leg is Leg.PREFILL else None,
        **({} if spec.adapters is None else lora_arguments(spec.adapters)),
    }
    return {name: value for name, value in given.items() if value is not None}


def _sleep(spec: TrtllmSpec) -> LlmArguments:
    return {"sleep_config": {"restore_modes": RESTORE_MODES}} if spec.releases_memory else {}


def _nested(flat: dict[str, TrtllmSetting]) -> LlmArguments:
    """Return arguments with the fields of each configuration object in a dictionary."""
    nested: LlmArguments = {}
    objects: dict[str, dict[str, TrtllmSetting | dict[str, str]]] = {}
    for name, value in flat.items():
        outer, dot, inner = name.partition(".")
        if dot:
            objects.setdefault(outer, {})[inner] = value
        else:
            nested[name] = value
    return {**nested, **objects}


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(TrtllmBoot).decode
