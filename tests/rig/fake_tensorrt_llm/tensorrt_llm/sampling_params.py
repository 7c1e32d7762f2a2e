from ._types import GuidedDecodingParams, SamplingParams

__all__ = ["GuidedDecodingParams", "SamplingParams"]
