"""The published signatures of TensorRT-LLM that this kind calls, by version, as data.

TensorRT-LLM cannot be imported on a node, and its parameters differ by version. Each parameter here has the first
version that takes it. The source is TensorRT-LLM's own repository, at the versions of `VERSIONS`: the references of its
tests of the API's stability (`tests/unittest/api_stability/references*/*.yaml`), and the signatures in
`tensorrt_llm/llmapi/llm.py`, `mm_encoder.py`, `sampling_params.py`, `scheduling_params.py`, `disaggregated_params.py`,
`executor/request.py` and `executor/result.py`. `LoraConfig` is of `_torch/peft/lora/config.py`, and of `lora_helper.py`
before 1.3.0rc26. Only names and defaults are held.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf
from types import MappingProxyType

from attrs import field, frozen

VERSIONS = ("1.0", "1.2", "1.3.0rc29")
"""The versions whose signatures are held, from the oldest; this kind is written for the last one."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")


class NoDefault(Enum):
    """The default of a parameter that has none."""

    REQUIRED = "required"


REQUIRED = NoDefault.REQUIRED


@frozen
class PublishedParameter:
    """One parameter of a call or one attribute of a result; `since` is the first held version that has it."""

    name: str
    default: object = None
    since: str = VERSIONS[0]


def _since(version: str, **defaults: object) -> tuple[PublishedParameter, ...]:
    return tuple(PublishedParameter(name, default, version) for name, default in defaults.items())


def _first(**defaults: object) -> tuple[PublishedParameter, ...]:
    return _since(VERSIONS[0], **defaults)


def _second(**defaults: object) -> tuple[PublishedParameter, ...]:
    return _since(VERSIONS[1], **defaults)


def _third(**defaults: object) -> tuple[PublishedParameter, ...]:
    return _since(VERSIONS[2], **defaults)


LLM_INIT, GENERATE = "LLM.__init__", "LLM.generate_async"
SAMPLING, GUIDED, HANDED = "SamplingParams", "GuidedDecodingParams", "DisaggregatedParams"
SCHEDULING, LORA, LORA_CONFIG = "SchedulingParams", "LoRARequest", "LoraConfig"
RESULT, CHOICE, LOGPROB = "RequestOutput", "CompletionOutput", "Logprob"
STATS, KV_EVENTS, CAPACITY = "LLM.get_stats_async", "LLM.get_kv_cache_events_async", "LLM.get_kv_cache_capacity"
COLLECTIVE_RPC, SHUTDOWN, ABORT = "LLM._collective_rpc", "LLM.shutdown", "RequestOutput.abort"
PREPROCESS, PREPROCESSED = "LLM.preprocess", "PreprocessedInputs"
ENCODER_INIT, ENCODE, AWAIT = "MultimodalEncoder.__init__", "MultimodalEncoder.generate_async", "RequestOutput.result"
SHARE, OPEN_SHARED = "SharedTensorContainer.from_tensor", "SharedTensorContainer.from_dict"

EMBEDDED_FAMILIES = frozenset({"qwen2_5_vl"})
"""The families of models, by `model_type`, that take embeddings here.

Their classes have the decorator `support_multimodal_disaggregated` in `tensorrt_llm/_torch/models/modeling_*.py`. Of
the families in `actors/media/model_files.py`, `qwen2_vl` has it not.
"""

TABLE: Mapping[str, tuple[PublishedParameter, ...]] = MappingProxyType(
    {
        LLM_INIT: (
            *_first(
                model=REQUIRED,
                tokenizer=None,
                skip_tokenizer_init=False,
                trust_remote_code=False,
                tensor_parallel_size=1,
                dtype="auto",
                pipeline_parallel_size=1,
                moe_expert_parallel_size=None,
                enable_lora=False,
                lora_config=None,
                guided_decoding_backend=None,
                max_batch_size=2048,
                max_input_len=1024,
                max_seq_len=None,
                max_beam_width=1,
                max_num_tokens=8192,
                load_format=0,
                enable_chunked_prefill=False,
                kv_cache_config=None,
                gpus_per_node=None,
                enable_attention_dp=False,
                iter_stats_max_iterations=None,
                scheduler_config=None,
                cache_transceiver_config=None,
                stream_interval=1,
                backend=None,
                disable_overlap_scheduler=False,
                enable_iter_perf_stats=False,
            ),
            *_second(return_perf_metrics=False, sleep_config=None),
            *_third(otlp_traces_endpoint=None),
        ),
        GENERATE: (
            *_first(
                inputs=REQUIRED,
                sampling_params=None,
                lora_request=None,
                prompt_adapter_request=None,
                streaming=False,
                kv_cache_retention_config=None,
                disaggregated_params=None,
            ),
            *_second(scheduling_params=None, cache_salt=None),
            *_third(trace_headers=None, conversation_params=None, priority=0.5),
        ),
        STATS: _first(timeout=2),
        KV_EVENTS: _first(timeout=2),
        CAPACITY: (),
        SHUTDOWN: (),
        ABORT: (),
        # A private method: its parameters are those with which Dynamo 1.6.1 calls it.
        COLLECTIVE_RPC: _third(method=REQUIRED, args=(), kwargs=None, non_block=False),
        SAMPLING: (
            *_first(
                end_id=None,
                pad_id=None,
                max_tokens=32,
                bad=None,
                bad_token_ids=None,
                stop=None,
                stop_token_ids=None,
                include_stop_str_in_output=False,
                embedding_bias=None,
                n=1,
                best_of=None,
                use_beam_search=False,
                top_k=None,
                top_p=None,
                seed=None,
                temperature=None,
                min_tokens=None,
                repetition_penalty=None,
                presence_penalty=None,
                frequency_penalty=None,
                min_p=None,
                logprobs=None,
                prompt_logprobs=None,
                return_perf_metrics=False,
                guided_decoding=None,
                ignore_eos=False,
                detokenize=True,
                add_special_tokens=True,
                skip_special_tokens=True,
            ),
            *_third(prompt_ignore_length=None, logprobs_simple_format=False, prompt_logprobs_simple_format=False),
        ),
        GUIDED: _first(json=None, regex=None, grammar=None, json_object=False, structural_tag=None),
        HANDED: (
            *_first(
                request_type=None, first_gen_tokens=None, ctx_request_id=None, opaque_state=None, draft_tokens=None
            ),
            *_second(
                multimodal_embedding_handles=None,
                multimodal_hashes=None,
                mrope_position_ids_handle=None,
                mrope_position_deltas_handle=None,
            ),
            *_third(
                first_gen_log_probs=None,
                first_gen_logits=None,
                disagg_request_id=None,
                ctx_dp_rank=None,
                ctx_info_endpoint=None,
                schedule_style=None,
            ),
        ),
        PREPROCESS: _third(inputs=REQUIRED, sampling_params=None, disaggregated_params=None),
        PREPROCESSED: _third(
            prompt_token_ids=REQUIRED, query_token_ids=None, multimodal_params=None, encoder_input_token_ids=None
        ),
        # The further arguments of an encoder are those of `LLM`.
        ENCODER_INIT: _second(model=REQUIRED, trust_remote_code=False, tensor_parallel_size=1, dtype="auto"),
        ENCODE: _second(inputs=REQUIRED, sampling_params=None),
        AWAIT: _first(timeout=None),
        # A private module, `tensorrt_llm._torch.shared_tensor`: Dynamo 1.6.1 opens the handles of an encoder by it.
        SHARE: _third(tensor=REQUIRED, local=False),
        OPEN_SHARED: _third(tensor_info=REQUIRED),
        SCHEDULING: _second(attention_dp_rank=None, attention_dp_relax=None),
        LORA: _first(lora_name=REQUIRED, lora_int_id=REQUIRED, lora_path="", lora_ckpt_source="hf"),
        LORA_CONFIG: (
            *_first(
                lora_dir=(),
                lora_ckpt_source="hf",
                max_lora_rank=64,
                lora_target_modules=(),
                trtllm_modules_to_hf_modules=None,
                max_loras=None,
                max_cpu_loras=None,
            ),
            *_third(
                swap_gate_up_proj_lora_b_weight=True, overlap_lora_and_base=False, cuda_graph_specialize_lora=False
            ),
        ),
        LOGPROB: _first(logprob=REQUIRED, rank=None),
        # Attributes of results, which nobody but TensorRT-LLM makes.
        CHOICE: (
            *_first(
                index=REQUIRED,
                token_ids=REQUIRED,
                logprobs=REQUIRED,
                prompt_logprobs=REQUIRED,
                finish_reason=None,
                stop_reason=None,
                disaggregated_params=None,
            ),
            *_second(request_perf_metrics=None),
        ),
        RESULT: (
            *_first(request_id=REQUIRED, prompt_token_ids=REQUIRED, outputs=REQUIRED, finished=REQUIRED),
            *_second(cached_tokens=0, disaggregated_params=None),
            *_third(error=None),
        ),
    }
)

SINCE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((SCHEDULING, ENCODER_INIT, ENCODE), VERSIONS[1]),
        **dict.fromkeys((CAPACITY, COLLECTIVE_RPC, PREPROCESS, PREPROCESSED, SHARE, OPEN_SHARED), VERSIONS[2]),
    }
)
"""The first held version of each row of `TABLE` that is not as old as the oldest one."""


LORA_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_dense",
        "gate_proj": "mlp_h_to_4h",
        "up_proj": "mlp_gate",
        "down_proj": "mlp_4h_to_h",
    }
)
"""TensorRT-LLM's names of the linear layers of a transformer, by those in a model's files.

They are of `get_default_trtllm_modules_to_hf_modules`, beside `LoraConfig`. The layers of mixtures of experts and of
state-space models are left out there or here: not all versions have them.
"""


@frozen(order=True)
class Version:
    """A version of TensorRT-LLM; a release candidate comes before its release."""

    major: int
    minor: int
    patch: int = 0
    candidate: float = inf

    @classmethod
    def of(cls, text: str) -> Version:
        """Return the version that a text begins with; raises `ValueError` if it begins with none."""
        if (found := _VERSION.match(text)) is None:
            raise ValueError(f"{text[:40]!r} is no version of TensorRT-LLM")
        major, minor, patch, candidate = found.groups()
        return cls(int(major), int(minor), int(patch or 0), inf if candidate is None else int(candidate))


@frozen
class Signatures:
    """The signatures of one version: of the newest held one that is not newer.

    So a parameter of a version between two held ones may be unknown here, and is never one that the version lacks.
    """

    column: str
    _names: Mapping[str, frozenset[str]] = field(init=False, repr=False, eq=False)

    @_names.default
    def _names_of_column(self) -> Mapping[str, frozenset[str]]:
        held = {*VERSIONS[: VERSIONS.index(self.column) + 1]}
        return {
            callee: frozenset(each.name for each in parameters if each.since in held)
            for callee, parameters in TABLE.items()
        }

    @classmethod
    def of(cls, version: str) -> Signatures:
        """Return the signatures of a version; raises `ValueError` for one older than all that are held."""
        running = Version.of(version)
        held = [each for each in VERSIONS if Version.of(each) <= running]
        if not held:
            raise ValueError(f"TensorRT-LLM {version} is older than {VERSIONS[0]}, the oldest that can be served with")
        return cls(held[-1])

    def holds(self, callee: str) -> bool:
        """Whether the version has a call at all."""
        return VERSIONS.index(SINCE.get(callee, VERSIONS[0])) <= VERSIONS.index(self.column)

    def has(self, callee: str, name: str) -> bool:
        """Whether a call, by its row in `TABLE`, takes a parameter of that name."""
        return name in self._names[callee]

    def unknown(self, callee: str, names: Iterable[str]) -> set[str]:
        """Return the names that a call does not take."""
        return {*names} - self._names[callee]
