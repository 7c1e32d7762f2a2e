"""Whether the scheduler lives, by its own loop: what it writes into shared memory outlives it.

It is asked something that its loop answers in passing. While requests run, a step may take longer than anybody wants to
wait for the answer: then a scheduler whose main threads compute is busy, and how long a request may take is for the
request's own deadlines to judge. One that neither answers nor computes is stopped, or waits for what never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sglang.srt.managers.io_struct import SlowDownReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

LOOK_S = 0.5


class LivenessProbe:
    """Asks one engine's scheduler, one question at a time."""

    def __init__(self, manager: TokenizerManager, schedulers: Sequence[int]) -> None:
        self._manager = manager
        self._schedulers = schedulers  # process ids, one a rank
        self._heard = 0
        self._asked: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """Note that the scheduler has said something."""
        self._heard += 1

    async def beat(self, *, running: bool) -> None:
        """Wait until the scheduler has said anything from now on, or has computed while requests run."""
        heard, computed = self._heard, self._computed()
        if self._asked is None or self._asked.done():
            # The question that changes nothing: by how much to slow down, for SGLang's own tests; None is not at all.
            ask = self._manager.slow_down(SlowDownReqInput(forward_sleep_time=None))
            self._asked = asyncio.get_running_loop().create_task(ask)
        while self._heard == heard and not self._asked.done():
            await asyncio.wait({self._asked}, timeout=LOOK_S)
            if running and all(map(int.__lt__, computed, self._computed())):
                return

    def _computed(self) -> list[int]:
        """Return how long the main thread of each scheduler has computed, in ticks of the kernel's clock."""
        return [_ticks(Path(f"/proc/{pid}/task/{pid}/stat")) for pid in self._schedulers]


def _ticks(stat: Path) -> int:
    with suppress(OSError):  # it has ended, which the guard sees, too
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
