from .._types import DEFAULT_REQUEST_PRIORITY, LoRARequest

__all__ = ["DEFAULT_REQUEST_PRIORITY", "LoRARequest"]
