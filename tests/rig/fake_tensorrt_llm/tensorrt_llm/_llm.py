"""`LLM` and `MultimodalEncoder`, with the calls and the arguments that are published."""

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ._adapters import Adapters
from ._cache import Cache
from ._executor import Executor, Request, RequestOutput, Response, drained
from ._faults import Fault, fault_of
from ._types import (
    DEFAULT_REQUEST_PRIORITY,
    CacheTransceiverConfig,
    DisaggregatedParams,
    KvCacheConfig,
    LoraConfig,
    LoRARequest,
    MemoryType,
    MultimodalParams,
    PreprocessedInputs,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    SchedulingParams,
)

VOCABULARY = int(os.environ.get("ESPALIER_FAKE_TRTLLM_VOCABULARY", "512"))
WINDOW = os.environ.get("ESPALIER_FAKE_TRTLLM_WINDOW")
"""The tokens of a second, smaller window of attention; no such layers if it is not set."""

KV_TOKENS = 32_768  # of a rank, unless its configuration names another number
MAX_SEQ_LEN = 4096
SLEEP_S = 0.02  # the time of a release or a return
FAILURES: Mapping[str, Mapping[Fault | None, type[Exception]]] = {
    "sleep": {Fault.SLEEP_FAILS: RuntimeError, Fault.SLEEP_HALF: ValueError},
    "wakeup": {Fault.WAKEUP_FAILS: RuntimeError},
}

ARGUMENTS: Mapping[str, object] = {  # by their names, with their defaults
    "pipeline_parallel_size": 1,
    "moe_expert_parallel_size": None,
    "enable_lora": False,
    "lora_config": None,
    "guided_decoding_backend": None,
    "max_batch_size": 2048,
    "max_input_len": 1024,
    "max_seq_len": None,
    "max_beam_width": 1,
    "max_num_tokens": 8192,
    "load_format": 0,
    "enable_chunked_prefill": False,
    "kv_cache_config": None,
    "gpus_per_node": None,
    "enable_attention_dp": False,
    "iter_stats_max_iterations": None,
    "scheduler_config": None,
    "cache_transceiver_config": None,
    "stream_interval": 1,
    "backend": None,
    "disable_overlap_scheduler": False,
    "enable_iter_perf_stats": False,
    "return_perf_metrics": False,
    "sleep_config": None,
    "otlp_traces_endpoint": None,
}
ConfigT = TypeVar("ConfigT")


def configured(kind: type[ConfigT], given: object) -> ConfigT:
    """Return a configuration that is given as an object, a dictionary, or not at all."""
    if isinstance(given, kind):
        return given
    return kind(**given) if isinstance(given, Mapping) else kind()


def vision_of(model: str | Path) -> Any:
    """Return the input processor of a model that takes images, None of any other one: only the first needs torch."""
    config = Path(model) / "config.json"
    if not config.exists() or "vision_config" not in config.read_text():
        return None
    from ._vision import Vision

    return Vision.of(model)


class LLM:
    def __init__(
        self,
        model: str | Path,
        tokenizer: object = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        for key in kwargs:
            if key not in ARGUMENTS:
                raise ValueError(f"LLM got invalid argument: {key}")
        self.args = {**ARGUMENTS, **kwargs, "model": model, "tensor_parallel_size": tensor_parallel_size}
        self._vocabulary = VOCABULARY
        self._vision = vision_of(model)
        self._numbers = count(1)
        self._unpinned = 0
        kv = configured(KvCacheConfig, self.args["kv_cache_config"])
        self._max_seq_len = int(self.args["max_seq_len"] or MAX_SEQ_LEN)
        ranks = tensor_parallel_size if self.args["enable_attention_dp"] else 1
        windows = (self._max_seq_len, *([int(WINDOW)] if WINDOW else []))
        caches = [
            Cache(
                blocks_max=(kv.max_tokens or KV_TOKENS) // kv.tokens_per_block,
                block_tokens=kv.tokens_per_block,
                windows=windows,
                rank=rank if ranks > 1 else None,
                events_max=kv.event_buffer_max_size,
                reuses=kv.enable_block_reuse,
            )
            for rank in range(ranks)
        ]
        self._executor: Executor | None = Executor(
            caches,
            vocabulary=self._vocabulary,
            batch_max=int(self.args["max_batch_size"]),
            tokens_max=self._max_seq_len,
            stats=bool(self.args["enable_iter_perf_stats"]),
        )
        if self.args["lora_config"] is not None:
            self._executor.adapters = Adapters(configured(LoraConfig, self.args["lora_config"]))
        scheduler = configured(SchedulerConfig, self.args["scheduler_config"])
        self._executor.by_priority = scheduler.waiting_queue_policy == "priority"
        if self.args["cache_transceiver_config"] is not None:
            transceiver = configured(CacheTransceiverConfig, self.args["cache_transceiver_config"])
            self._executor.transfers = transceiver.backend is not None
            if transceiver.kv_transfer_timeout_ms is not None:
                self._executor.hold_s = transceiver.kv_transfer_timeout_ms / 1000

    def generate_async(
        self,
        inputs: Sequence[int] | Mapping[str, Any] | PreprocessedInputs,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: object = None,
        streaming: bool = False,
        kv_cache_retention_config: object = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Mapping[str, str] | None = None,
        _postproc_params: object = None,
        scheduling_params: SchedulingParams | None = None,
        conversation_params: object = None,
        cache_salt: str | None = None,
        priority: float = DEFAULT_REQUEST_PRIORITY,
    ) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        if params.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        handed = disaggregated_params
        if handed is not None and handed.request_type == "context_only":
            params.max_tokens = 1
        images = inputs.multimodal_params if isinstance(inputs, PreprocessedInputs) else None
        if isinstance(inputs, PreprocessedInputs):
            prompt = list(inputs.prompt_token_ids)
        else:
            prompt = list(inputs["prompt_token_ids"] if isinstance(inputs, Mapping) else inputs)
        self._check(prompt, params, handed, priority)
        fault = fault_of(prompt)
        if fault is Fault.REFUSED:
            raise ValueError("the request is refused")
        seen = 0 if self._vision is None else self._seen(images, handed, len(prompt))
        adapters = self._executor.adapters
        lora = None if adapters is None else lora_request  # without a configuration the adapter is left out
        request = Request(
            number=next(self._numbers),
            prompt=prompt,
            params=params,
            streaming=streaming,
            handed=handed,
            salt=cache_salt,
            known=0,
            pictured=images is not None,
            hashes=() if images is None else tuple(map(tuple, images.multimodal_input or ())),
            lora=None if lora is None else lora.lora_int_id,
            priority=priority,
            rank=self._rank(scheduling_params),
            fault=fault,
        )
        try:
            request.known = seen ^ (0 if adapters is None or lora is None else adapters.load(lora))
        except (OSError, ValueError, KeyError) as error:
            request.responses.put_nowait(Response(error=RequestError(f"Failed to load LoRA adapter: {error}")))
        else:
            self._executor.submit(request)
        return RequestOutput(request)

    def _rank(self, wanted: SchedulingParams | None) -> int:
        """Return the rank of a request: without a strict wish the engine chooses one."""
        assert self._executor is not None
        ranks = len(self._executor.caches)
        if wanted is None or wanted.attention_dp_rank is None or wanted.attention_dp_relax is not False:
            self._unpinned += 1
            return self._unpinned % ranks
        return wanted.attention_dp_rank

    def _seen(self, images: MultimodalParams | None, handed: DisaggregatedParams | None, tokens: int) -> int:
        """Return what the model knows of images and positions, which no prompt of such a model is without."""
        if images is None:
            if handed is None or handed.mrope_position_ids_handle is None:
                raise KeyError("mrope_position_ids")
            config = {
                "mrope_position_ids": handed.mrope_position_ids_handle,
                "mrope_position_deltas": handed.mrope_position_deltas_handle,
            }
            images = MultimodalParams(multimodal_data={"mrope_config": config})
        return int(self._vision.seen(images, tokens))

    @property
    def tokenizer(self) -> Any:
        return None if self._vision is None else self._vision.tokenizer

    def preprocess(
        self,
        inputs: Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
    ) -> PreprocessedInputs:
        if self._vision is None:
            raise ValueError("the fake preprocesses prompts with images alone")
        made: PreprocessedInputs = self._vision.preprocess(inputs, disaggregated_params)
        return made

    def _check(
        self,
        prompt: list[int],
        params: SamplingParams,
        handed: DisaggregatedParams | None,
        priority: float,
    ) -> None:
        executor = self._executor
        assert executor is not None
        if not prompt or len(prompt) >= self._max_seq_len:
            raise ValueError(f"a prompt of {len(prompt)} tokens exceeds max_seq_len {self._max_seq_len}")
        if params.n > 1:
            raise ValueError("the fake gives one answer a request")
        if params.guided_decoding is not None and self.args["guided_decoding_backend"] is None:
            raise ValueError("guided decoding needs a guided_decoding_backend")
        if params.embedding_bias is not None and len(params.embedding_bias) != self._vocabulary:
            raise ValueError(f"embedding_bias must have {self._vocabulary} values")
        if not 0 <= priority <= 1:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {priority}")
        leg = handed is not None and handed.request_type in {"context_only", "generation_only"}
        if leg and not executor.transfers:
            raise ValueError("kv_cache_transceiver is disabled, please set 'cache_transceiver_config'")
        if executor.asleep:
            raise RuntimeError(f"released: {executor.asleep}")

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        assert self._executor is not None
        return drained([self._executor.stats] if self._executor.stats is not None else [], timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        assert self._executor is not None
        return drained([cache.events for cache in self._executor.caches], timeout)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        assert self._executor is not None
        cache = self._executor.caches[0]
        tokens = cache.blocks_max * cache.block_tokens
        return {"maxNumBlocks": cache.blocks_max, "tokensPerBlock": cache.block_tokens, "maxNumTokens": tokens}

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, non_block: bool = False
    ) -> list[object]:
        executor = self._executor
        assert executor is not None
        if method not in {"sleep", "wakeup"}:
            raise ValueError(f"unknown method {method}")
        if fault_of(()) is Fault.SLEEP_UNSUPPORTED:
            raise ValueError("Executor type <class 'Executor'> does not support collective RPC.")
        if self.args["sleep_config"] is None:
            raise ValueError("Sleep feature is not enabled, please set sleep_config in the LLM arguments.")
        tags = {MemoryType(tag) for tag in args[0]}
        if executor.requests:
            raise RuntimeError("the real one would wait for the requests that run")
        time.sleep(SLEEP_S)
        failure = FAILURES[method].get(fault_of(()))
        if failure is not None:
            raise failure("CUDA driver error: out of memory")
        if method == "wakeup":
            executor.asleep -= tags
        elif executor.asleep:
            raise RuntimeError("the real one releases no further tags while some are released")
        else:
            executor.asleep |= tags
        if method == "sleep" and MemoryType.KV_CACHE in tags:
            for cache in executor.caches:
                cache.lose()
        return [None]

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.check_health()

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
