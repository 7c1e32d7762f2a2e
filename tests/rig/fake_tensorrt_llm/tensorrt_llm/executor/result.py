from .._types import CompletionOutput, Logprob

__all__ = ["CompletionOutput", "Logprob"]
