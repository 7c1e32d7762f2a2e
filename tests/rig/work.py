"""The work of a piece of code in bytecode instructions, since a clock would never repeat itself.

What a function of C does counts as nothing, however long it takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions `work` runs, in itself and in every function of Python that it calls."""
    if sys.version_info >= (3, 12):  # where a trace function may miss them
        return _monitored(work)
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


if sys.version_info >= (3, 12):

    def _monitored(work: Callable[[], object]) -> int:
        count, monitoring = 0, sys.monitoring

        def add(_code: object, _offset: int) -> None:
            nonlocal count
            count += 1

        monitoring.use_tool_id(monitoring.PROFILER_ID, __name__)
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION, add)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.INSTRUCTION)
        try:
            work()
        finally:
            monitoring.set_events(monitoring.PROFILER_ID, 0)
            monitoring.free_tool_id(monitoring.PROFILER_ID)
        return count
