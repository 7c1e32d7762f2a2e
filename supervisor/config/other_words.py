"""Words of other servers for keys of `cluster.toml`: those of vLLM, SGLang, Dynamo, TGI, llama.cpp and TensorRT-LLM.

Whoever moves from such a server writes its words first. Each row has the key that is meant, in place of "unknown key".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
from attrs import evolve

from protocol.strict.mistakes import Mistake
from supervisor.config.gone_keys import ENTRY
from supervisor.config.schema import Kinds, sections
from supervisor.config.sections import ClusterSection, GatewaySection

_KEYS = {  # the key by its section, and words for it; a word of several rows means the key of its own section
    "model.NAME.path": """
        model_path model model_dir model_folder model_id hf_model hf_model_id hf_repo repo_id tokenizer tokenizer_path
        checkpoint weights
    """,
    "model.NAME.template": "chat_template chat_template_file chat_template_path custom_jinja_template jinja_template",
    "model.NAME.policy": """
        router_mode routing_policy routing load_balancing load_balance_policy load_balance_method scheduling_policy
    """,
    "model.NAME.queue_max": "max_queue_size max_queued_requests queue_size max_pending_requests",
    "engine.NAME.model": "model_path model_id served_model_name model_name",
    "engine.NAME.kind": "engine backend engine_type type framework",
    "engine.NAME.leg": "disaggregation_mode role kv_role worker_type is_prefill_worker is_decode_worker mode",
    "engine.NAME.data_parallel": "data_parallel_size dp dp_size replicas num_replicas instances dp_attention_size",
    "engine.NAME.tensor_parallel": """
        tensor_parallel_size tp tp_size tensor_parallelism num_shard num_shards num_gpus gpus gpu_count
    """,
    "engine.NAME.slots": """
        max_num_seqs max_running_requests max_batch_size max_num_requests n_parallel parallel np max_concurrent_requests
        max_concurrency max_concurrent_sequences max_seqs
    """,
    "engine.NAME.context_max": """
        max_model_len max_model_length context_length max_context_len max_context_length max_seq_len max_seq_length
        max_sequence_length max_length ctx_size n_ctx ctx context_size context_window context
    """,
    "engine.NAME.kv_tokens_max": """
        max_total_tokens max_total_num_tokens max_num_tokens_in_kv_cache max_tokens_in_paged_kv_cache kv_cache_size
        num_gpu_blocks_override num_gpu_blocks kv_cache_memory_bytes max_kv_tokens kv_cache_tokens
    """,
    "engine.NAME.page_size": "block_size kv_block_size kv_cache_block_size tokens_per_block kv_page_size",
    "engine.NAME.prefill_chunk": """
        chunked_prefill_size max_num_batched_tokens max_batch_prefill_tokens max_num_tokens prefill_chunk_size
        chunk_size n_batch ubatch_size n_ubatch batch_size long_prefill_token_threshold
    """,
    "engine.NAME.memory_fraction": """
        gpu_memory_utilization mem_fraction_static mem_fraction gpu_memory_fraction cuda_memory_fraction
        kv_cache_free_gpu_mem_fraction kv_cache_free_gpu_memory_fraction free_gpu_memory_fraction gpu_mem_util
    """,
    "engine.NAME.ranks_on": "nnodes num_nodes node_rank multi_node",
    "engine.NAME.dist_port": "dist_init_addr dist_init_address master_port master_addr",
    "engine.NAME.transfer": "disaggregation_transfer_backend kv_transfer_config kv_connector transfer_backend",
    "engine.NAME.bootstrap_port": "disaggregation_bootstrap_port",
    "engine.NAME.start_within_s": "startup_timeout start_timeout model_load_timeout load_timeout",
    "engine.NAME.settings": """
        args extra_args engine_args server_args sglang_args sglang vllm_args additional_args extra_engine_args
    """,
    "engine.NAME.environment": "env envs env_vars environment_variables cuda_visible_devices gpu_ids devices",
    "engine.NAME.events": "kv_events_config kv_events",
    "engine.NAME.metrics": "enable_metrics",
    "engine.NAME.settings.pp_size": "pipeline_parallel_size pp pipeline_parallel",
    "engine.NAME.experts.parallel": "expert_parallel_size ep ep_size enable_expert_parallel expert_parallel",
    "engine.NAME.settings.disable_cuda_graph": "enforce_eager",
    "engine.NAME.settings.disable_radix_cache": """
        enable_prefix_caching no_enable_prefix_caching disable_prefix_caching prefix_caching enable_radix_cache
        enable_block_reuse
    """,
    "engine.NAME.settings.random_seed": "seed",
    "engine.NAME.adapters": "lora_modules lora_adapters lora lora_paths enable_lora",
    "engine.NAME.settings.json_model_override_args": "hf_overrides rope_scaling rope_theta",
    "engine.NAME.settings.quantization": "quantize quant load_in_4bit load_in_8bit",
    "engine.NAME.settings.kv_cache_dtype": "cache_type_k cache_type_v kv_dtype",
    "gateway.node": "gateway_node",
    "gateway.host": "host bind bind_address bind_host address hostname listen_host http_host listen ip",
    "gateway.port": "port http_port api_port listen_port server_port bind_port",
    "gateway.processes": "workers num_workers api_server_count web_concurrency n_workers num_processes",
    "gateway.allowed_hosts": "server_name server_names trusted_hosts",
    "gateway.allowed_origins": """
        cors_allow_origins cors_allow_origin cors_origins cors allow_origins allow_origin cors_allowed_origins
    """,
    "gateway.keys": """
        api_key api_keys api_key_file api_keys_file admin_api_key auth_token auth bearer_token client_keys admin_key
    """,
    "gateway.tls_certificate": """
        tls_cert tls_cert_path tls_cert_file tls_certfile tls_crt ssl_certfile ssl_cert ssl_cert_file ssl_certificate
        certificate certfile cert cert_file
    """,
    "gateway.tls_key": """
        tls_key_path tls_key_file tls_keyfile tls_private_key ssl_keyfile ssl_key ssl_key_file ssl_certificate_key
        private_key keyfile key_file key
    """,
    "gateway.requests_max": """
        max_concurrent_requests max_requests max_inflight_requests max_in_flight concurrency_limit limit_concurrency
        max_concurrency
    """,
    "gateway.waiting_max": "max_queued_requests max_waiting_requests max_queue_size queue_size max_pending_requests",
    "gateway.prompt_tokens_max": "max_input_tokens max_input_length max_input_len max_prompt_tokens max_prompt_length",
    "gateway.total_s": "timeout request_timeout timeout_s request_timeout_secs request_timeout_s",
    "gateway.limits.idle_s": "timeout_keep_alive keep_alive_timeout keepalive_timeout idle_timeout",
    "gateway.limits.body_bytes_max": "max_body_size client_max_body_size payload_limit max_payload_size",
    "gateway.limits.connections_max": "max_connections worker_connections",
    "node.NAME.host": "hostname machine address ip node_ip",
    "node.NAME.listen": "port bind bind_address listen_address",
    "node.NAME.metrics": "metrics_port metrics_host prometheus_port system_port metrics_address health_port",
    "node.NAME.drain_s": "graceful_shutdown_timeout timeout_graceful_shutdown drain_timeout shutdown_timeout",
    "node.NAME.logs": "log_dir log_folder logs_dir log_path",
    "cluster.secret": "token password shared_secret auth_token secret_file cluster_secret",
    "cluster.join": "peers seeds nodes etcd_endpoints nats_server",
    "cluster.tls_certificate": "tls_cert tls_cert_path ssl_certfile ssl_cert certificate cert cert_file",
    "cluster.tls_key": "tls_key_path tls_keyfile ssl_keyfile ssl_key private_key key",
    "cluster.tls_authority": "tls_ca tls_ca_cert tls_ca_certs ssl_ca_certs ca ca_cert ca_file cacert tls_ca_file",
}
_TABLES = {  # words for tables
    "model": "llm llms model_list",
    "engine": "worker workers backend backends instance instances replica replicas service services",
    "gateway": "server servers http api frontend ingress proxy openai",
    "node": "machine machines",
    "cluster": "network mesh discovery etcd nats",
}
_SENTENCES = {  # what is no key at all, with what does it
    'the name of a model for clients is that of its section, [model."NAME"]': """
        served_model_name served_model_names model_name alias name
    """,
    "nothing is downloaded: `hf download NAME --local-dir FOLDER` beforehand, and name the folder as `path`": """
        download_dir revision hf_token model_revision code_revision tokenizer_revision hf_file hf_cache_dir cache_dir
    """,
    "sampling parameters are in each request, their defaults in generation_config.json of the model's folder": """
        temperature top_p top_k min_p max_tokens repetition_penalty override_generation_config generation_config
        default_sampling_params preferred_sampling_params sampling_defaults
    """,
    "the log is on the standard error of the node, without texts of requests": """
        log_level log_requests disable_log_requests enable_log_requests disable_log_stats verbose loglevel access_log
    """,
}
_NOTES = {
    "gateway.keys": "It is a file, whose lines `python -m supervisor hash-key NAME` prints",
    "node.NAME.listen": 'It is an address for other nodes, such as "10.0.0.1:7401"',
    "node.NAME.metrics": 'It is an address, such as "0.0.0.0:9100"',
    "engine.NAME.environment": "It is a table of variables and their texts",
}
_BY_WORD: dict[str, list[str]] = {}
for _key, _words in (*_TABLES.items(), *_KEYS.items()):
    for _word in _words.split():
        _BY_WORD.setdefault(_word, []).append(_key)
_SENTENCE_OF = {word: sentence for sentence, words in _SENTENCES.items() for word in words.split()}


def keys() -> Iterator[str]:
    """Yield every key that the table names, by its path with NAME for a name."""
    yield from (*_TABLES, *_KEYS)


def explained(mistake: Mistake, kinds: Kinds) -> Mistake:
    """Return a mistake about an unknown key, with the key that is meant by a word of another server or section.

    A similar key of the same section is more likely to be meant than one of another section.
    """
    path = ENTRY.sub(r"\1.NAME", mistake.path)
    section, _, written = path.rpartition(".")
    word = _plain(written)
    meaning = _meant_here(word, section)
    if meaning is None and "did you mean" not in mistake.message:
        meaning = _meant_elsewhere(word, section) or _key_elsewhere(word, section, kinds)
        meaning = meaning or next(filter(None, (kind.explain_key(word) for kind in kinds.values())), None)
    return mistake if meaning is None else evolve(mistake, message=f"is not a key here; {meaning}")


def meant(written: str, section: str) -> str | None:
    """Return what is meant by a word of another server in a section, None if nothing is known of it."""
    word = _plain(written)
    return _meant_here(word, section) or _meant_elsewhere(word, section)


def _meant_here(word: str, section: str) -> str | None:
    rows = (row.rpartition(".") for row in _BY_WORD.get(word, ()))
    return next((f"did you mean {key}?{_note(f'{home}.{key}')}" for home, _, key in rows if home == section), None)


def _meant_elsewhere(word: str, section: str) -> str | None:
    rows = [row.rpartition(".") for row in _BY_WORD.get(word, ()) if "." in row]
    if word in _SENTENCE_OF and not any(_table(home) == _table(section) for home, _, _ in rows):
        return _SENTENCE_OF[word]
    return next((f"did you mean {key} of [{home}]?{_note(f'{home}.{key}')}" for home, _, key in rows), None)


def _table(section: str) -> str:
    return section.partition(".")[0]


def _note(row: str) -> str:
    return f" {_NOTES[row]}" if row in _NOTES else ""


def _key_elsewhere(word: str, section: str, kinds: Kinds) -> str | None:
    """Return the sections that have a key of this name, those of the same table alone if there are any."""
    homes = [home for home, keys in _section_keys(kinds) if word in keys]
    near = [home for home in homes if _table(home) == _table(section)]
    return f"it is a key of {' and of '.join(f'[{home}]' for home in near or homes)}" if homes else None


def _section_keys(kinds: Kinds) -> Iterator[tuple[str, set[str]]]:
    """Yield each section, with NAME for a name, and its keys."""
    named = {f"{table}.NAME": classes for table, classes in sections(kinds).items()}
    for path, classes in {"gateway": (GatewaySection,), "cluster": (ClusterSection,), **named}.items():
        yield from _keys_of(path, classes)


def _keys_of(path: str, classes: Iterable[type[attrs.AttrsInstance]]) -> Iterator[tuple[str, set[str]]]:
    fields = [field for each in classes for field in attrs.fields(each)]
    yield path, {field.name for field in fields}
    inner = {field.name: type(field.default) for field in fields if attrs.has(type(field.default))}
    for name, cls in inner.items():
        yield from _keys_of(f"{path}.{name}", (cls,))


def _plain(written: str) -> str:
    """Return a word as the table has it, from an option of a command line such as `--max-model-len`."""
    return written.removeprefix('["').removesuffix('"]').lstrip("-").replace("-", "_").lower()
