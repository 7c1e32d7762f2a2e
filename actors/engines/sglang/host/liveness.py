"""The liveness of the scheduler, as its own loop shows it: a sign in shared memory would stay when the loop has ended.

The probe is a question that the loop answers between two steps. While requests run, a step may take longer than the
probe should: a scheduler whose main threads compute meanwhile counts as alive, and how long a request may take is left
to the request's own deadlines. A scheduler that neither answers nor computes is stopped, or waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sglang.srt.managers.io_struct import SlowDownReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

POLL_S = 0.5


class LivenessProbe:
    """Probes one engine's scheduler, one question at a time."""

    def __init__(self, manager: TokenizerManager, schedulers: Sequence[int]) -> None:
        self._manager = manager
        self._schedulers = schedulers  # process ids, one a rank
        self._outputs = 0  # that the scheduler has sent
        self._question: asyncio.Task[None] | None = None

    def on_output(self) -> None:
        """Note that the scheduler has sent something."""
        self._outputs += 1

    async def probe(self, *, running: bool) -> None:
        """Wait until the scheduler has sent anything from now on, or has computed while requests run."""
        outputs, computed = self._outputs, self._computed()
        if self._question is None or self._question.done():
            # A request that changes nothing: SGLang's tests slow the scheduler down by it, and None means not at all.
            ask = self._manager.slow_down(SlowDownReqInput(forward_sleep_time=None))
            self._question = asyncio.get_running_loop().create_task(ask)
        while self._outputs == outputs and not self._question.done():
            await asyncio.wait({self._question}, timeout=POLL_S)
            if running and all(map(int.__lt__, computed, self._computed())):
                return

    def _computed(self) -> list[int]:
        """Return the processor time of each scheduler's main thread, in ticks of the kernel's clock."""
        return [_ticks(Path(f"/proc/{pid}/task/{pid}/stat")) for pid in self._schedulers]


def _ticks(stat: Path) -> int:
    with suppress(OSError):  # the process has ended, which the watchdog notices as well
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
