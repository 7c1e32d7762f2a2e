"""The boot message of a host: SGLang's arguments, its environment, its folder.

A node never imports SGLang, so all of SGLang's arguments are decided here, from the engine's description and the table
of every host's arguments. An operator's own `settings` come last, as far as `setting_rules` allows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from ipaddress import ip_address

import msgspec
from attrs import frozen

from actors.engines.adapter_files import AdapterLimits
from actors.engines.sglang.spec import GrammarLimits, Setting, SglangSpec
from protocol.messages.cluster import Leg

GRAMMAR_STEP_MS, BYTES_MAX = "ESPALIER_GRAMMAR_STEP_MS", "ESPALIER_GRAMMAR_BYTES_MAX"
"""The variables of an engine's scheduler with its limits for grammars."""

GRAMMAR_FAILED = "Grammar accept_token failed"
"""The beginning of SGLang's error for a request whose grammar refuses a token, or allows none."""

GRAMMAR_TOO_SLOW = "the grammar takes too long for a token"
"""The beginning of the reason in that error where the grammar was too slow."""

VISION_PART, EMBEDDINGS_ONLY = "ESPALIER_VISION_PART", "embeddings"
"""The variable, and its value, for a scheduler without a vision tower."""

EVENTS_TOPIC = "kv-events"
"""The topic of KV events on their ZMQ sockets."""

UNIX_SOCKET = "inproc"
"""The end of the names of Unix sockets: SGLang gives each rank a path of its own only where it finds this word."""

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder in which the processes of a host write their metrics."""

PROFILES_FOLDER = "SGLANG_TORCH_PROFILER_DIR"
"""The variable that names the folder into which a scheduler writes its profiles."""

RECORDS_FOLDER = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
"""The variable that names the folder into which a scheduler writes the record of its experts."""

DIFFUSION_FILE = "diffusion.json"
"""The file in a host's folder with the settings of a diffusion model's algorithm, which is YAML as well."""

# The arguments of every host, each with the reason for it.
DEFAULT_ARGUMENTS: dict[str, Setting] = {
    "incremental_streaming_output": True,  # else every chunk repeats the whole answer
    "sleep_on_idle": True,  # else an idle scheduler burns a core
    "skip_server_warmup": True,
    "constrained_json_disable_any_whitespace": True,  # a small model fills its JSON with white space for ever
    "host": "127.0.0.1",
    "log_level": "warning",
}
CPU_PREFILL_CHUNK = 256  # an abort waits for the piece that is being computed: some 20 ms
CPU_EMBED_CHUNK = 1024  # tokens of an embedder's step, of which nobody waits for the first
PARTS_WAITING_MAX = 4  # requests to an embedder beyond those that run at once
ITEMS_RUNNING_MAX = 256  # items of an embedder in one step, as long as they fit into it
CPU_ARGUMENTS: dict[str, Setting] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,  # a step has ended when it returns; run ahead, each token is sent a step later
    "chunked_prefill_size": CPU_PREFILL_CHUNK,
    "mem_fraction_static": 0.1,
}
ENVIRONMENT = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # else a crash takes 5 s
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # and 65 s more
    # The log probabilities of a prompt are computed for so many tokens at a time, each with scores for the vocabulary:
    # of 152,000 tokens they take 300 MB, in up to three copies at once. SGLang's own 2,048 take more than a GB each.
    "SGLANG_LOGPROB_CHUNK_SIZE": "512",
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
TRACES_ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "SGLANG_TRACE_LEVEL": "2",  # from 3 on there is a span for each token
}
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes half a minute and gains nothing here
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@frozen
class EventEndpoints:
    """The ZMQ sockets by which a scheduler publishes KV events, as its host connects to them."""

    endpoint: str
    replay_endpoint: str


@frozen
class BootMessage:
    """The configuration of a host at its start: to run an engine, or to check grammars for one."""

    name: str
    folder: str  # its own, as TMPDIR; removed when it has ended
    arguments: dict[str, Setting]
    environment: dict[str, str]
    checks: GrammarLimits | None = None  # None: it runs an engine, or an encoder
    batch_max: int | None = None  # items of an encoder's batch; None: it is no encoder
    task: str | None = None  # of an embedder: "embed" or "score"
    requests_max: int = 0  # of an embedder, at once
    sequential: bool = False  # whether the hand-off of its leg is a sequential one
    has_tower: bool = True  # whether an engine's images are pixels; without a tower they are embeddings
    files: str = ""  # the folder for what its operations leave; empty: it has no operations that leave files
    files_bytes_max: int = 0
    expert_ranks: int = 0  # 0: the tokens of experts are not recorded
    adapters: AdapterLimits | None = None  # LoRA adapters that it takes
    events: tuple[EventEndpoints, ...] = ()  # where its host receives KV events, by rank; empty: nowhere


def default_transfer(device: str) -> str:
    """Return SGLang's way to move KV caches on a device where an operator names none."""
    return "mooncake_tcp" if device == "cpu" else "mooncake"


def build(spec: SglangSpec, folder: str, files: str = "") -> BootMessage:
    """Return the boot message of a host whose folder is `folder`; what its operations leave lies in `files`."""
    if spec.leg is Leg.ENCODE:
        return _encoder(spec, folder)
    if spec.leg is Leg.EMBED:
        return _embedder(spec, folder)
    on_cpu = spec.device == "cpu"
    arguments: dict[str, Setting] = {
        **_computing(spec),
        "max_running_requests": spec.slots,
        "dp_size": spec.data_parallel if spec.data_parallel > 1 else None,
        **_reports(spec),
        "dllm_algorithm": spec.diffusion,
        "dllm_algorithm_config": f"{folder}/{DIFFUSION_FILE}" if spec.diffusion_settings else None,
        **spec.experts,
    }
    if spec.leg is not Leg.BOTH:
        arguments |= {
            "host": spec.host,
            "disaggregation_mode": spec.leg.value,
            "disaggregation_transfer_backend": spec.transfer or default_transfer(spec.device),
            "disaggregation_bootstrap_port": spec.bootstrap_port,
        }
    if spec.leg is Leg.PREFILL and spec.sequential:
        arguments["optimistic_prefill_attempts"] = 1  # a prompt is computed before its decode is asked
    if spec.leg is Leg.DECODE and on_cpu:
        arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    if spec.adapters is not None:
        arguments |= _adapters(spec.adapters, on_cpu=on_cpu)
    if spec.nodes > 1:
        arguments |= {"nnodes": spec.nodes, "node_rank": spec.rank, "dist_init_addr": spec.dist_init_address}
    given: dict[str, Setting] = {name: value for name, value in arguments.items() if value is not None}
    # A decode gets the KV cache of images and computes with none of them.
    loads_tower = spec.has_tower and spec.leg is not Leg.DECODE
    events = _events(spec, folder, given)
    limits = {GRAMMAR_STEP_MS: str(spec.grammars.step_ms), BYTES_MAX: str(spec.grammars.bytes_max)}
    return BootMessage(
        name=spec.name,
        folder=folder,
        arguments={**DEFAULT_ARGUMENTS, **(CPU_ARGUMENTS if on_cpu else {}), **given, **spec.settings},
        environment={
            **environment(spec.device, traced=spec.traces is not None),
            **_peer_environment(spec),
            **limits,
            **({} if loads_tower else {VISION_PART: EMBEDDINGS_ONLY}),
            **spec.environment,
            **({METRICS_FOLDER: folder} if spec.metrics else {}),
            **({PROFILES_FOLDER: files, RECORDS_FOLDER: files} if files else {}),
        },
        checks=spec.grammars if spec.checks_grammars else None,
        sequential=spec.sequential and spec.leg is not Leg.BOTH,
        has_tower=spec.has_tower,
        files=files,
        files_bytes_max=spec.files_bytes_max,
        expert_ranks=spec.expert_ranks,
        adapters=None if spec.checks_grammars else spec.adapters,
        events=events,
    )


def _computing(spec: SglangSpec) -> dict[str, Setting]:
    """Return the arguments of every engine with KV memory."""
    return {
        "model_path": spec.model_path,
        "max_total_tokens": spec.kv_tokens_max,
        "page_size": spec.page_size,
        "tp_size": spec.tensor_parallel,
        "context_length": spec.context_max,
        "chunked_prefill_size": spec.prefill_chunk,
        "mem_fraction_static": spec.memory_fraction,
    }


def lora_paths(folders: Mapping[str, str]) -> Setting:
    """Return SGLang's argument for the adapters in some folders, by name."""
    return [f"{name}={folder}" for name, folder in folders.items()] or None


def _reports(spec: SglangSpec) -> dict[str, Setting]:
    """Return SGLang's arguments for its own metrics and spans."""
    metrics: dict[str, Setting] = {"enable_metrics": spec.metrics or None}
    if spec.traces is None or spec.checks_grammars:
        return metrics
    return {**metrics, "enable_trace": True, "otlp_traces_endpoint": spec.traces, "otlp_service_name": "sglang"}


def _adapters(limits: AdapterLimits, *, on_cpu: bool) -> dict[str, Setting]:
    """Return SGLang's arguments for LoRA adapters; it may compute with one more than `active_max`: with none."""
    return {
        "enable_lora": True,
        "max_lora_rank": limits.bounds.rank_max,
        "lora_target_modules": [*limits.bounds.modules],
        "max_loras_per_batch": (limits.active_max or limits.loaded_max) + 1,
        "lora_paths": lora_paths(limits.folders),
        "lora_backend": "torch_native" if on_cpu else None,  # SGLang's own default needs a GPU
    }


def _events(spec: SglangSpec, folder: str, arguments: dict[str, Setting]) -> tuple[EventEndpoints, ...]:
    """Add the sockets of KV events to an engine's arguments, and return each rank's sockets for its host.

    They are Unix sockets in its folder, unless others than this node may listen, too.
    """
    if not spec.publishes or spec.checks_grammars or spec.rank:
        return ()
    listen, replay = spec.events_address, spec.events_replay_address
    bound = f"tcp://{listen}" if listen else f"ipc://{folder}/events.{UNIX_SOCKET}"
    bound_replay = f"tcp://{replay}" if replay else f"ipc://{folder}/replay.{UNIX_SOCKET}"
    arguments["kv_events_config"] = json.dumps(
        {
            "publisher": "zmq",
            "endpoint": bound,
            "bind": True,
            "replay_endpoint": bound_replay,
            "topic": EVENTS_TOPIC,
        }
    )
    return tuple(
        EventEndpoints(_connectable(_of_rank(bound, rank)), _connectable(_of_rank(bound_replay, rank)))
        for rank in range(spec.data_parallel)
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint that SGLang makes of one for a data-parallel rank."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _connectable(endpoint: str) -> str:
    """Return a local endpoint for a socket that is bound to all addresses."""
    return endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _encoder(spec: SglangSpec, folder: str) -> BootMessage:
    """Return the boot message of an encoder, which has neither requests nor KV memory."""
    own = {name: DEFAULT_ARGUMENTS[name] for name in ("host", "log_level")}
    device = {name: CPU_ARGUMENTS[name] for name in ("device", "attention_backend")} if spec.device == "cpu" else {}
    arguments: dict[str, Setting] = {
        "model_path": spec.model_path,
        "encoder_only": True,
        "encoder_transfer_backend": "zmq_to_tokenizer",  # nothing is sent by it: the host has a link
    }
    return BootMessage(
        name=spec.name,
        folder=folder,
        arguments={**own, **device, **arguments, **spec.settings},
        environment={**environment(spec.device), **spec.environment},
        batch_max=spec.batch_max,
    )


def _embedder(spec: SglangSpec, folder: str) -> BootMessage:
    """Return the boot message of an embedder; its host adds what the model's files ask for."""
    on_cpu = spec.device == "cpu"
    arguments: dict[str, Setting] = {
        **_computing(spec),
        "is_embedding": True,
        "grammar_backend": "none",
        "max_running_requests": ITEMS_RUNNING_MAX,
        "chunked_prefill_size": spec.prefill_chunk or (CPU_EMBED_CHUNK if on_cpu else None),
    }
    given: dict[str, Setting] = {name: value for name, value in arguments.items() if value is not None}
    limits = {GRAMMAR_STEP_MS: str(spec.grammars.step_ms), BYTES_MAX: str(spec.grammars.bytes_max)}
    return BootMessage(
        name=spec.name,
        folder=folder,
        arguments={**DEFAULT_ARGUMENTS, **(CPU_ARGUMENTS if on_cpu else {}), **given, **spec.settings},
        environment={
            **environment(spec.device),
            **limits,
            **spec.environment,
        },
        task=spec.task,
        requests_max=spec.slots,
    )


def _peer_environment(spec: SglangSpec) -> dict[str, str]:
    """Return the variables of a host that hosts of other engines or other ranks connect to."""
    if spec.nodes == 1 and spec.leg is Leg.BOTH:
        return {}
    if spec.nodes == 1:  # SGLang cannot listen at a host name, and finds an address itself where it is given none
        return {"SGLANG_HOST_IP": spec.host if _is_address(spec.host) else ""}
    # Without the first, SGLang never returns from the start of a rank other than 0.
    return {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0", "SGLANG_HOST_IP": spec.host}


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def environment(device: str, *, traced: bool = False) -> dict[str, str]:
    """Return the variables of every host on `device`, and of its zygote."""
    of_traces = TRACES_ENVIRONMENT if traced else {}
    return {**ENVIRONMENT, **of_traces, **(CPU_ENVIRONMENT if device == "cpu" else {})}


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(BootMessage).decode
