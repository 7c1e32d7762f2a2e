"""What a host is told at its start: SGLang's arguments, its environment, its folder."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, TypeAlias

import msgspec
from attrs import Factory, frozen

from protocol.cluster import Leg
from protocol.strict.checks import Within

START_FAILED = "start_failed"
"""The code of the Bye of a host whose engine could not start."""

GRAMMAR_STEP_MS, BYTES_MAX = "ESPALIER_GRAMMAR_STEP_MS", "ESPALIER_GRAMMAR_BYTES_MAX"
"""The variables by which an engine's scheduler knows its limits for grammars."""

GRAMMAR_TOO_SLOW = "the grammar takes too long for a token"
"""How the error begins that ends a request in the scheduler because of its grammar."""

Setting: TypeAlias = str | int | float | bool | list[str | int] | None

# Set for every host. Each line is there because its absence was seen to hurt.
ALWAYS: dict[str, Setting] = {
    "incremental_streaming_output": True,  # else every chunk repeats the whole answer
    "sleep_on_idle": True,  # else an idle scheduler burns a core
    "skip_server_warmup": True,
    "constrained_json_disable_any_whitespace": True,  # a small model fills its JSON with white space for ever
    "host": "127.0.0.1",
    "log_level": "warning",
}
CPU_PREFILL_CHUNK = 256  # an abort waits for the piece that is being computed: some 20 ms
ON_CPU: dict[str, Setting] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "chunked_prefill_size": CPU_PREFILL_CHUNK,
    "mem_fraction_static": 0.1,
}
ENVIRONMENT = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # else a crash takes 5 s
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # and 65 s more
    "HF_HUB_OFFLINE": "1",  # a model is a folder; nothing is fetched
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
ENVIRONMENT_ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes half a minute and gains nothing here
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


Time: TypeAlias = Annotated[float, Within(above=0, at_most=3600)]
Some: TypeAlias = Annotated[int, Within(at_least=1, at_most=1_000_000)]


@frozen(kw_only=True)
class GrammarLimits:
    """`[engine.NAME.grammars]`: what a request's grammar may cost an engine, and how many are checked ahead.

    Times are of a processor, not of a clock on the wall.
    """

    compile_s: Time = 2.0
    walk_s: Time = 0.5  # of trying tokens: the longer, the more of what a grammar can do is seen
    step_ms: Annotated[float, Within(at_least=0.1, at_most=1e4)] = (
        10.0  # to accept one token and to say which may be next
    )
    bytes_max: Annotated[int, Within(at_least=2**20, at_most=2**40)] = (
        256 * 1024 * 1024
    )  # of compiling one, and of all that an engine keeps
    at_once: Annotated[int, Within(at_least=1, at_most=64)] = 2  # each in a process of its own
    waiting_max: Some = 64
    verdicts_max: Some = 1024  # that are remembered


@frozen
class SglangSpec:
    """One engine as its operator described it; sizes in tokens."""

    name: str
    model_path: str
    device: str  # "cpu" or "cuda"
    slots: int
    kv_tokens_max: int
    context_max: int | None = None
    page_size: int = 16
    tensor_parallel: int = 1
    memory_fraction: float | None = None  # of the device, for weights and KV together
    prefill_chunk: int | None = None  # the longest piece of a prompt computed in one step
    leg: Leg = Leg.BOTH
    host: str = "127.0.0.1"  # where other engines reach this one
    bootstrap_port: int | None = None  # of a prefill
    transfer: str | None = None  # how KV caches move from a prefill to a decode
    nodes: int = 1  # that the engine spans, each with one host of it
    rank: int = 0  # of this node among them
    meet: str | None = None  # host:port of rank 0, where the ranks of several nodes meet
    settings: dict[str, Setting] = Factory(dict)  # SGLang's own, as they are
    environment: dict[str, str] = Factory(dict)
    grammars: GrammarLimits = GrammarLimits()
    checks_grammars: bool = False  # it is no engine, but checks grammars for those like it


@frozen
class BootMessage:
    """What a host needs to become an engine, or to check grammars for one."""

    name: str
    folder: str  # its own: TMPDIR, and removed by whoever outlives it
    arguments: dict[str, Setting]
    environment: dict[str, str]
    checks: GrammarLimits | None = None  # of grammars; None: it is an engine


def boot(spec: SglangSpec, folder: str) -> BootMessage:
    """Return the boot message of a host that is to live in `folder`."""
    on_cpu = spec.device == "cpu"
    arguments: dict[str, Setting] = {
        "model_path": spec.model_path,
        "max_running_requests": spec.slots,
        "max_total_tokens": spec.kv_tokens_max,
        "page_size": spec.page_size,
        "tp_size": spec.tensor_parallel,
        "context_length": spec.context_max,
        "chunked_prefill_size": spec.prefill_chunk,
        "mem_fraction_static": spec.memory_fraction,
    }
    if spec.leg is not Leg.BOTH:
        arguments |= {
            "host": spec.host,
            "disaggregation_mode": spec.leg.value,
            "disaggregation_transfer_backend": spec.transfer or ("mooncake_tcp" if on_cpu else "mooncake"),
            "disaggregation_bootstrap_port": spec.bootstrap_port,
        }
    if spec.leg is Leg.DECODE and on_cpu:
        arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    if spec.nodes > 1:
        arguments |= {"nnodes": spec.nodes, "node_rank": spec.rank, "dist_init_addr": spec.meet}
    said = {name: value for name, value in arguments.items() if value is not None}
    limits = {GRAMMAR_STEP_MS: str(spec.grammars.step_ms), BYTES_MAX: str(spec.grammars.bytes_max)}
    return BootMessage(
        name=spec.name,
        folder=folder,
        arguments={**ALWAYS, **(ON_CPU if on_cpu else {}), **said, **spec.settings},
        environment={**environment(spec.device), **_beside_others(spec), **limits, **spec.environment},
        checks=spec.grammars if spec.checks_grammars else None,
    )


def _beside_others(spec: SglangSpec) -> dict[str, str]:
    """Return the variables of an engine's host that others must find."""
    if spec.nodes == 1 and spec.leg is Leg.BOTH:
        return {}
    if spec.nodes == 1:  # SGLang cannot listen at a name, and looks for an address of this host where it is given none
        return {"SGLANG_HOST_IP": spec.host if _is_address(spec.host) else ""}
    # Without the first, SGLang never returns to a host whose rank is not 0.
    return {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0", "SGLANG_HOST_IP": spec.host}


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def environment(device: str) -> dict[str, str]:
    """Return the variables that a host on `device`, or its zygote, runs with beside its own."""
    return {**ENVIRONMENT, **(ENVIRONMENT_ON_CPU if device == "cpu" else {})}


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(BootMessage).decode
