from ._types import SchedulingParams

__all__ = ["SchedulingParams"]
