"""Rules for SGLang's own arguments: an operator may set how it computes, and nothing that the host relies on.

An argument set by a key of ours, or by the host, would win in silence and break something later: an embedding engine
crashes at its first request, and an engine with more ranks than configured gets requests on only one.
"""

from __future__ import annotations

import json
from difflib import get_close_matches

from actors.engines.sglang.arguments import CHOICES, TYPES

_GIVEN_BY = {  # the key of `cluster.toml` that decides, and the arguments that would contradict it
    "the model's path": "model_path tokenizer_path revision served_model_name download_dir",
    "the model's template": "chat_template hf_chat_template_name completion_template",
    "slots": "max_running_requests",
    "kv_tokens_max": "max_total_tokens",
    "context_max": "context_length",
    "page_size": "page_size",
    "prefill_chunk": "chunked_prefill_size",
    "memory_fraction": "mem_fraction_static",
    "device": "device",
    "tensor_parallel": "tp_size",
    "data_parallel": "dp_size",
    "node, ranks_on and dist_port": "nnodes node_rank dist_init_addr",
    "node.NAME.host": "host",
    "leg": "disaggregation_mode enable_pd_role_switch",
    "transfer": "disaggregation_transfer_backend",
    "bootstrap_port": "disaggregation_bootstrap_port",
    "vision": "enable_multimodal",
    "[engine.NAME.events]": "kv_events_config",
    "diffusion": "dllm_algorithm",
    "[engine.NAME.diffusion_settings]": "dllm_algorithm_config",
    "metrics": "enable_metrics",
    "tracing.engines": "enable_trace otlp_traces_endpoint otlp_service_name",
    "[engine.NAME.experts]": (
        "ep_size enable_eplb eplb_rebalance_num_iterations ep_num_redundant_experts ep_dispatch_algorithm"
        " init_expert_location expert_distribution_recorder_mode expert_distribution_recorder_buffer_size"
    ),
    "task": "is_embedding",
    "[engine.NAME.adapters]": (
        "enable_lora max_lora_rank lora_target_modules lora_paths max_loaded_loras max_loras_per_batch"
    ),
}
_REASONS = {  # why the host cannot do with any other value than its own
    "images and videos are made into the input of the model by the host, and limited by the gateway": (
        "mm_process_config limit_mm_data_per_request mm_preprocess_cache_size_mb trust_mm_content_hashes"
        " enable_mm_global_cache mm_global_cache_backend enable_prefix_mm_cache"
    ),
    "an engine here generates text": (
        "encoder_only language_only language_model_only enable_adaptive_dispatch_to_encoder encoder_urls"
        " encoder_register_urls encoder_transfer_backend encoder_bootstrap_port"
    ),
    "a block is sent once it is ready": "dllm_fdfo",
    "the router chooses the rank of a request, and ranks that share their attention have not been tried": (
        "attn_dp_size load_balance_method enable_dp_attention enable_dp_attention_local_control_broadcast use_ray"
    ),
    "all ranks of an engine run, or none": "elastic_ep_backend elastic_ep_initial_size max_ep_size ep_join_mode"
    " ep_join_rank_offset elastic_ep_scale_timeout",
    "the host needs SGLang's tokenizer for grammars, and takes its tokens as they come": (
        "skip_tokenizer_init tokenizer_worker_num detokenizer_worker_num incremental_streaming_output stream_interval"
        " batch_notify_size return_input_ids return_output_ids"
    ),
    "nobody listens to it here": (
        "load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_ipc_name"
        " forward_pass_metrics_worker_id decoupled_spec_role decoupled_spec_rank decoupled_spec_bind_endpoint"
        " decoupled_spec_connect_endpoints"
    ),
    "prompts and answers are written nowhere": (
        "log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder"
        " export_metrics_to_file export_metrics_to_file_dir debug_tensor_dump_output_folder"
        " debug_tensor_dump_input_file debug_tensor_dump_layers spec_trace_dir"
    ),
    "nothing that an engine starts outlives it, and a model's folder is only read": (
        "sidecar sidecar_args weight_cache_mode weight_cache_socket weight_cache_timeout delete_ckpt_after_loading"
        " custom_sigquit_handler"
    ),
    "a request says what it wants, and is never changed in silence": (
        "allow_auto_truncate preferred_sampling_params sampling_defaults"
    ),
    "the engine would wait for somebody who never comes": "checkpoint_engine_wait_weights_before_ready",
    "it is for SGLang's own server, which does not run here": (
        "port http2_max_concurrent_streams http2_initial_connection_window_size enable_http2 fastapi_root_path"
        " grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads smg_grpc_mode smg_http_sidecar_port"
        " gated_launch_port ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password enable_ssl_refresh api_key"
        " admin_api_key skip_server_warmup warmups tool_server tool_call_parser reasoning_parser enable_strict_thinking"
        " file_storage_path log_level_http"
        " uvicorn_access_log_exclude_prefixes trust_request_chat_template default_chat_template_kwargs"
        " enable_cache_report stream_response_default_include_usage enable_response_store enable_http_worker_reuseport"
        " asr_max_buffer_seconds asr_max_concurrent_sessions allowed_media_domains media_url_max_file_size_mb"
    ),
}
REFUSED: dict[str, str] = {
    **{name: f"is given by {key}" for key, names in _GIVEN_BY.items() for name in names.split()},
    **{name: f"cannot be set: {why}" for why, names in _REASONS.items() for name in names.split()},
}
"""What cannot be set, by its name, with the reason."""

JSON = ("json_model_override_args", "model_loader_extra_config")
"""The texts that SGLang parses as an object of JSON."""

_GRAMMAR_BACKENDS = ("xgrammar", "none")  # backends whose grammars can be checked ahead; `none` has no grammars
_KINDS: dict[str, tuple[type, ...]] = {
    "choice": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "list": (list, tuple),
}


def setting_mistake(name: str, value: object) -> str | None:
    """Return what is wrong with a setting, None if SGLang may have it."""
    kind = TYPES.get(name)
    if kind is None:
        near = get_close_matches(name, TYPES.keys() - REFUSED.keys(), n=1)
        return f"is no argument of SGLang 0.5.23{f'; the nearest is {near[0]}' if near else ''}"
    if name in REFUSED:
        return REFUSED[name]
    if name == "grammar_backend" and value not in _GRAMMAR_BACKENDS:
        return (
            f"must be {' or '.join(_GRAMMAR_BACKENDS)}: no limit on the cost of a grammar would hold for what"
            f" {value!r:.60} compiles"
        )
    kinds = _KINDS.get(kind)
    # To Python a boolean is an integer.
    fits = kinds is None or (isinstance(value, kinds) and isinstance(value, bool) is (kind == "boolean"))
    if name in CHOICES and not (fits and str(value) in CHOICES[name]):
        near = get_close_matches(str(value), CHOICES[name], n=1, cutoff=0.8)
        advice = f"; did you mean {near[0]}?" if near else ""
        return f"must be one of {', '.join(CHOICES[name])}, got {value!r:.60}{advice}"
    if fits and name in JSON and not _is_object(str(value)):
        return f"must be an object of JSON, got {value!r:.60}"
    return None if fits else f"must be {'an' if kind == 'integer' else 'a'} {kind}, got {value!r:.60}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
