from ._types import DisaggregatedParams, DisaggScheduleStyle

__all__ = ["DisaggScheduleStyle", "DisaggregatedParams"]
