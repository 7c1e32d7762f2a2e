"""The LoRA adapters of an engine as arguments of TensorRT-LLM's `LLM`.

TensorRT-LLM asserts that no step has more adapters than `max_loras`. Its scheduler counts the memory of adapters
instead, and adapters of a small rank need less. So there is a place for each adapter that may be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.engines.adapter_files import ALL, AdapterBounds, AdapterLimits
from actors.engines.trtllm.signatures import LORA_MODULES
from actors.engines.trtllm.spec import TrtllmSetting

WEIGHTS = "adapter_model.safetensors"
"""The name of the file of weights that TensorRT-LLM reads first; any other one must be a pickle."""

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The layers that are computed at once: a place for one is useless without places for the others."""


def adapter_bounds(rank_max: int, modules: Iterable[str]) -> AdapterBounds:
    """Return the bounds on an engine's adapters from the layers in its table, or from `ALL`."""
    named = {*modules}
    taken = named | {layer for group in TOGETHER if named & {*group} for layer in group}
    return AdapterBounds(
        rank_max, tuple(layer for layer in LORA_MODULES if layer in taken or ALL in named), WEIGHTS, fuses=False
    )


def lora_arguments(limits: AdapterLimits) -> dict[str, TrtllmSetting]:
    """Return the arguments of an engine that takes adapters."""
    return {
        "lora_config.max_lora_rank": limits.bounds.rank_max,
        "lora_config.lora_target_modules": [LORA_MODULES[layer] for layer in limits.bounds.modules],
        "lora_config.max_loras": limits.loaded_max,
        "lora_config.max_cpu_loras": limits.loaded_max,
    }
