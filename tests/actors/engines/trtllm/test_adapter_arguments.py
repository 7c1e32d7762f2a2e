"""The adapters of an engine as TensorRT-LLM's arguments: a place for each that may be loaded, in whole groups of layers."""

from __future__ import annotations

import pytest

from actors.engines.adapter_files import ALL, AdapterLimits
from actors.engines.trtllm.adapter_arguments import TOGETHER, adapter_bounds, lora_arguments
from actors.engines.trtllm.signatures import LORA_CONFIG, LORA_MODULES, Signatures


@pytest.mark.parametrize(
    ("named", "taken"),
    [
        ((ALL,), tuple(LORA_MODULES)),
        (("down_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "down_proj")),
        (("up_proj",), ("gate_proj", "up_proj")),
        (("o_proj",), ("o_proj",)),
    ],
)
def test_layers_that_are_computed_at_once_have_places_together(named: tuple[str, ...], taken: tuple[str, ...]) -> None:
    bounds = adapter_bounds(8, named)
    assert (bounds.rank_max, bounds.modules, bounds.fuses) == (8, taken, False)


def test_each_adapter_that_may_be_loaded_has_a_place_in_a_step() -> None:
    """TensorRT-LLM asserts that a step has no more adapters than places."""
    limits = AdapterLimits(bounds=adapter_bounds(16, ("o_proj", "gate_proj")), loaded_max=5)
    found = lora_arguments(limits)
    assert found == {
        "lora_config.max_lora_rank": 16,
        "lora_config.lora_target_modules": ["attn_dense", "mlp_h_to_4h", "mlp_gate"],
        "lora_config.max_loras": 5,
        "lora_config.max_cpu_loras": 5,
    }


@pytest.mark.parametrize("version", ["1.0", "1.3.0rc29"])
def test_every_argument_is_one_of_the_published_fields(version: str) -> None:
    found = lora_arguments(AdapterLimits(bounds=adapter_bounds(8, (ALL,)), loaded_max=2))
    assert not Signatures.of(version).unknown(LORA_CONFIG, (name.removeprefix("lora_config.") for name in found))


def test_all_layers_have_a_name_in_the_library() -> None:
    assert {layer for group in TOGETHER for layer in group} <= LORA_MODULES.keys()
    assert len({*LORA_MODULES.values()}) == len(LORA_MODULES)
