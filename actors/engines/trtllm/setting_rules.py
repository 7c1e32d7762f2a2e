"""Rules for the arguments of `tensorrt_llm.LLM` in an engine's settings, by their names in NVIDIA's published API.

The fields of a configuration object are written with a dot: `"kv_cache_config.dtype"`. Values are left to TensorRT-LLM.
"""

from __future__ import annotations

from difflib import get_close_matches

from actors.engines.trtllm.signatures import VERSIONS

_NAMES = """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision
    tokenizer_revision pipeline_parallel_size context_parallel_size moe_tensor_parallel_size
    moe_expert_parallel_size moe_cluster_parallel_size gpus_per_node enable_attention_dp cp_config enable_lora
    lora_config batched_logits_processor guided_decoding_backend speculative_config max_batch_size max_input_len
    max_seq_len max_beam_width max_num_tokens load_format enable_chunked_prefill kv_cache_config stream_interval
    iter_stats_max_iterations request_stats_max_iterations peft_cache_config scheduler_config
    cache_transceiver_config batching_type normalize_log_probs gather_generation_logits num_postprocess_workers
    postprocess_tokenizer_dir reasoning_parser garbage_collection_gen0_threshold backend build_config
    cuda_graph_config checkpoint_loader checkpoint_format disable_overlap_scheduler moe_config attn_backend
    enable_mixed_sampler enable_trtllm_sampler kv_cache_dtype enable_iter_perf_stats enable_iter_req_stats
    print_iter_log torch_compile_config enable_autotuner enable_layerwise_nvtx_marker enable_min_latency
    force_dynamic_quantization allreduce_strategy return_perf_metrics sleep_config otlp_traces_endpoint
"""
NAMES = frozenset(_NAMES.split())
"""The arguments of `LLM`, from `tests/unittest/api_stability/references*/llm.yaml` of NVIDIA/TensorRT-LLM."""

OBJECTS = frozenset(name for name in NAMES if name.endswith("_config"))
"""The arguments that are objects with fields of their own."""

_GIVEN_BY = {
    "the model's path": "model tokenizer revision tokenizer_revision",
    "slots": "max_batch_size",
    "kv_tokens_max": "kv_cache_config.max_tokens",
    "page_size": "kv_cache_config.tokens_per_block",
    "memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "[engine.NAME.events]": "kv_cache_config.event_buffer_max_size",
    "context_max": "max_seq_len max_input_len",
    "prefill_chunk": "max_num_tokens enable_chunked_prefill",
    "tensor_parallel": "tensor_parallel_size",
    "data_parallel": "enable_attention_dp",
    "transfer": "cache_transceiver_config.backend",
    "releases_memory": "sleep_config",
    "[engine.NAME.adapters]": (
        "enable_lora peft_cache_config lora_config.lora_dir lora_config.lora_ckpt_source lora_config.max_lora_rank"
        " lora_config.lora_target_modules lora_config.trtllm_modules_to_hf_modules lora_config.max_loras"
        " lora_config.max_cpu_loras"
    ),
}
_REASONS = {
    "the host runs TensorRT-LLM's PyTorch backend alone, and no other, such as _autodeploy": "backend build_config",
    "the host takes token ids as they come": (
        "skip_tokenizer_init stream_interval num_postprocess_workers postprocess_tokenizer_dir reasoning_parser"
    ),
    "a request has one answer": "max_beam_width",
    "the load of the engine is read from it": "enable_iter_perf_stats enable_iter_req_stats iter_stats_max_iterations",
    "it is an object of Python": "batched_logits_processor checkpoint_loader",
}
REFUSED: dict[str, str] = {
    **{name: f"is given by {key}" for key, names in _GIVEN_BY.items() for name in names.split()},
    **{name: f"cannot be set: {why}" for why, names in _REASONS.items() for name in names.split()},
}
"""What cannot be set, by its name, with the reason."""


def setting_mistake(name: str) -> str | None:
    """Return what is wrong with the name of a setting, None if `LLM` may have it."""
    if name in REFUSED:
        return REFUSED[name]
    outer, dot, inner = name.partition(".")
    if outer in REFUSED:
        return REFUSED[outer]
    if dot and outer in OBJECTS and inner.isidentifier():
        return None
    if outer in OBJECTS:
        return f'has fields of its own: write "{outer}.FIELD"'
    if outer in NAMES and not dot:
        return None
    near = get_close_matches(name, NAMES, n=1)
    return f"is no argument of TensorRT-LLM {VERSIONS[-1]}'s LLM{f'; the nearest is {near[0]}' if near else ''}"
