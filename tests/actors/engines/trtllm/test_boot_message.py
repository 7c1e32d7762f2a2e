"""The arguments with which a host starts `tensorrt_llm.LLM`, each one that its published signature has."""

from __future__ import annotations

import pytest
from attrs import evolve

from actors.engines.adapter_files import AdapterLimits
from actors.engines.trtllm import boot_message
from actors.engines.trtllm.adapter_arguments import adapter_bounds
from actors.engines.trtllm.signatures import LLM_INIT, Signatures
from actors.engines.trtllm.spec import TrtllmSpec
from protocol.messages.cluster import Leg

ADAPTERS = AdapterLimits(bounds=adapter_bounds(8, ("o_proj",)), loaded_max=2, folders={"one": "/one"})
SPEC = TrtllmSpec("e", "/models/m", slots=8, kv_tokens_max=4096)


def test_an_engine_of_both_legs_has_the_arguments_of_its_description() -> None:
    assert boot_message.build(SPEC, "/run/e").arguments == {
        "model": "/models/m",
        "tensor_parallel_size": 1,
        "max_batch_size": 8,
        "max_num_tokens": 8192,
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
        "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 32},
    }


@pytest.mark.parametrize("leg", [Leg.BOTH, Leg.PREFILL, Leg.DECODE])
def test_every_argument_is_one_of_the_published_signature(leg: Leg) -> None:
    spec = TrtllmSpec("e", "/m", 8, 4096, context_max=2048, memory_fraction=0.5, leg=leg, publishes=True)
    arguments = boot_message.build(spec, "/run/e").arguments
    assert not Signatures.of("1.3.0rc29").unknown(LLM_INIT, arguments)
    assert ("cache_transceiver_config" in arguments) is (leg is not Leg.BOTH)
    assert ("disable_overlap_scheduler" in arguments) is (leg is Leg.PREFILL)


def test_settings_come_last_and_fields_of_objects_join_those_of_the_keys() -> None:
    settings = {"dtype": "bfloat16", "kv_cache_config.dtype": "fp8"}
    spec = TrtllmSpec("e", "/m", 8, 4096, settings={**settings})
    arguments = boot_message.build(spec, "/run/e").arguments
    assert arguments["dtype"] == "bfloat16"
    assert arguments["kv_cache_config"] == {"max_tokens": 4096, "tokens_per_block": 32, "dtype": "fp8"}


def test_ranks_with_requests_of_their_own_compute_attention_apart() -> None:
    boot = boot_message.build(TrtllmSpec("e", "/m", 8, 4096, tensor_parallel=2, data_parallel=2), "/run/e")
    assert boot.data_parallel == 2
    assert (boot.arguments["enable_attention_dp"], boot.arguments["tensor_parallel_size"]) == (True, 2)
    assert boot.arguments["max_batch_size"] == 8, "TensorRT-LLM counts it for each rank"


def test_memory_that_can_be_released_returns_from_a_copy_but_for_the_kv_cache() -> None:
    spec = TrtllmSpec("e", "/m", 8, 4096, releases_memory=True)
    boot = boot_message.build(spec, "/run/e")
    assert boot.arguments["sleep_config"] == {"restore_modes": {"kv_cache": "NONE"}}
    assert boot_message.decode(boot_message.encode(boot)) == boot
    assert boot.owns_weights
    assert not boot_message.build(evolve(spec, settings={"load_format": "GMS"}), "/run/e").owns_weights


def test_an_engine_with_adapters_has_a_configuration_of_them() -> None:
    arguments = boot_message.build(TrtllmSpec("e", "/m", 8, 4096, adapters=ADAPTERS), "/run/e").arguments
    assert arguments["lora_config"] == {
        "max_lora_rank": 8,
        "lora_target_modules": ["attn_dense"],
        "max_loras": 2,
        "max_cpu_loras": 2,
    }


def test_a_boot_message_is_the_same_once_it_has_been_sent() -> None:
    boot = boot_message.build(TrtllmSpec("e", "/m", 8, 4096, environment={"A": "b"}, adapters=ADAPTERS), "/run/e")
    assert boot_message.decode(boot_message.encode(boot)) == boot
