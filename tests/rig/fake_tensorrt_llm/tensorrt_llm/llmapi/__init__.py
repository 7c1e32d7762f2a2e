from .._encoder import MultimodalEncoder
from .._executor import RequestOutput
from .._llm import LLM
from .._types import (
    CacheTransceiverConfig,
    CompletionOutput,
    DisaggregatedParams,
    GuidedDecodingParams,
    KvCacheConfig,
    LoraConfig,
    SamplingParams,
    SchedulerConfig,
    SleepConfig,
)

__all__ = [
    "LLM",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "LoraConfig",
    "MultimodalEncoder",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SleepConfig",
]
