"""How often an engine has failed requests by itself: a rate of that is no request's fault any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MOST = 5
WINDOW_S = 60.0
WORDS_MAX = 300  # characters


class Failures:
    """Counts an engine's bugs: more than `MOST` in `WINDOW_S` and it had better be started again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at: deque[float] = deque()

    def count(self, last: str) -> str | None:
        """Note a failure by its last words; return why the engine should end if this was one too many."""
        now = self._now()
        self._at.append(now)
        while self._at[0] <= now - WINDOW_S:
            self._at.popleft()
        if len(self._at) <= MOST:
            return None
        return f"it failed {len(self._at)} requests within {WINDOW_S:g} s, the last by {last[:WORDS_MAX]}"
