"""The progress of a run: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import math
from typing import TextIO

import trio
from attrs import define

from bench.load.messages import Progress
from bench.load.plan import Pace
from bench.load.process import Run

BAR_WIDTH = 24
TERMINAL_EVERY_S = 0.2
LINE_EVERY_S = 5.0


@define(eq=False)
class Bar:
    """Shows a run's progress."""

    run: Run
    pace: Pace
    out: TextIO
    _last: tuple[float, int] = (0.0, 0)  # time and tokens of the last line

    async def show(self) -> None:
        """Show it until cancelled."""
        live = self.out.isatty()
        try:
            while True:
                await trio.sleep(TERMINAL_EVERY_S if live else LINE_EVERY_S)
                self.out.write(f"\r\033[K{self.line()}" if live else f"{self.line()}\n")
                self.out.flush()
        finally:
            if live:
                self.out.write("\r\033[K")
                self.out.flush()

    def line(self) -> str:
        """Return the line of this moment."""
        if self.run.start_at is None:
            return f"warming up: {len(self.run.warmed)} of {len(self.run.jobs)} processes are ready"
        elapsed_s, progress = max(0.0, self.run.clock() - self.run.start_at), self.run.total_progress
        before_s, before = self._last
        self._last = (elapsed_s, progress.tokens)
        rate = (progress.tokens - before) / (elapsed_s - before_s) if elapsed_s > before_s else 0.0
        return describe(progress, self.pace, elapsed_s, rate)


def describe(progress: Progress, pace: Pace, elapsed_s: float, tokens_per_s: float) -> str:
    """Return one line about the progress of a run."""
    ended = progress.completed + progress.cancelled + progress.failed
    by_count = ended / pace.requests if pace.requests else 0.0
    by_time = elapsed_s / pace.duration_s if pace.duration_s else 0.0
    part = min(1.0, max(by_count, by_time))
    filled = math.floor(part * BAR_WIDTH)
    count = f"{ended}/{pace.requests}" if pace.requests else str(ended)
    words = [f"{count} ended", f"{progress.running} running"]
    words += [f"{progress.cancelled} left"] if progress.cancelled else []
    words += [f"{progress.failed} FAILED"] if progress.failed else []
    words += [f"{tokens_per_s:,.0f} tokens/s", f"{elapsed_s:.0f} s"]
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {', '.join(words)}"
