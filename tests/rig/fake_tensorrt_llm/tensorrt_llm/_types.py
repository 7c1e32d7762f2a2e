"""The parameters and the results, with the names and the defaults that are published."""

import os
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Any

from attrs import define, field

DEFAULT_REQUEST_PRIORITY = 0.5


class RequestError(RuntimeError):
    """One request failed, and the engine goes on."""


@define
class Logprob:
    logprob: float
    rank: int | None = None


@define
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __attrs_post_init__(self) -> None:
        if not os.path.exists(self.lora_path):  # noqa: PTH110
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


@define(kw_only=True)
class GuidedDecodingParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def guides(self) -> int:
        return sum(map(bool, (self.json, self.regex, self.grammar, self.json_object, self.structural_tag)))


@define(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Sequence[float] | None = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_simple_format: bool = False
    prompt_logprobs_simple_format: bool = False
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __attrs_post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.guided_decoding is not None and self.guided_decoding.guides() > 1:
            raise ValueError("Only one guide can be used for a request")

    @property
    def greedy(self) -> bool:
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0

    @property
    def end(self) -> int | None:
        """The end token, which is none of the vocabulary where it is ignored."""
        return -1 if self.ignore_eos else self.end_id

    @property
    def stops(self) -> list[int]:
        """The stop tokens, which `ignore_eos` drops as well."""
        return [] if self.ignore_eos else self.stop_token_ids or []


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


@define(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: DisaggScheduleStyle | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None

    def __attrs_post_init__(self) -> None:
        if self.request_type not in {None, "context_only", "generation_only", "context_and_generation"}:
            raise ValueError(f"Unknown request type: {self.request_type}.")


@define(kw_only=True)
class SchedulingParams:
    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None


@define
class CompletionOutput:
    """One answer, which grows from step to step."""

    index: int
    text: str = ""
    token_ids: list[int] = field(factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | list[float] = field(factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None


@define
class MultimodalParams:
    """The images of a prompt, as tensors or handles."""

    multimodal_input: Any = None  # the hash of each image
    multimodal_data: dict[str, Any] = field(factory=dict)


@define
class PreprocessedInputs:
    """A prompt that needs no preprocessing any more."""

    prompt_token_ids: list[int]
    query_token_ids: list[int] | None = None
    multimodal_params: MultimodalParams | None = None
    encoder_input_token_ids: list[int] | None = None


# Arguments of `LLM`, which also takes them as dictionaries ---------------------------------


@define(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    tokens_per_block: int = 32
    dtype: str = "auto"


@define(kw_only=True)
class CacheTransceiverConfig:
    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


@define(kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"
    waiting_queue_policy: str = "fcfs"


@define(kw_only=True)
class LoraConfig:
    lora_dir: Sequence[str] = ()
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: Sequence[str] = ()
    trtllm_modules_to_hf_modules: dict[str, str] | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj_lora_b_weight: bool = True
    overlap_lora_and_base: bool = False
    cuda_graph_specialize_lora: bool = False


class MemoryType(StrEnum):
    """The tags of memory that can be released (`ExecutorMemoryType`)."""

    SAMPLER = "sampler"
    DRAFTER = "drafter"
    GUIDED_DECODER = "guided_decoder"
    SPEC_RESOURCES = "spec_resource_manager"
    MODEL_EXTRA = "model_extra"
    EXTRA_RESOURCES = "executor_extra"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_ENGINE_DRAFT = "draft_model"
    MODEL_WEIGHTS_MAIN = "model_weights"
    MODEL_WEIGHTS_DRAFT = "draft_model_weights"


@define(kw_only=True)
class SleepConfig:
    restore_modes: dict[str, str] = field(factory=dict)
