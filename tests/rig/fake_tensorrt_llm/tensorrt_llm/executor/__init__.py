from .._types import CompletionOutput, LoRARequest
from .utils import RequestError

__all__ = ["CompletionOutput", "LoRARequest", "RequestError"]
