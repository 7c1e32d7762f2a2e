"""The rate at which an engine fails requests for reasons of its own: not by an abort, nor because they are wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

FAILURES_MAX = 5  # in a window
WINDOW_S = 60.0
REASON_LENGTH_MAX = 300  # characters


class FailureRate:
    """Counts the requests that an engine fails by itself: with over `FAILURES_MAX` in `WINDOW_S` it is at fault."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: deque[float] = deque()

    def record(self, error: str) -> str | None:
        """Record a failure by its error; return the reason to end the engine, or None."""
        now = self._now()
        self._times.append(now)
        while self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if len(self._times) <= FAILURES_MAX:
            return None
        return f"it failed {len(self._times)} requests within {WINDOW_S:g} s, the last by {error[:REASON_LENGTH_MAX]}"
