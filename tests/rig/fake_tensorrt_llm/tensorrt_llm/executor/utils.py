from .._types import RequestError

__all__ = ["RequestError"]
