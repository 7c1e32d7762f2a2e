"""The liveness of schedulers and vision towers, by questions: a sign in shared memory would outlive its scheduler.

The loop of a scheduler, or the thread of a vision tower, answers between two steps. While requests run, a step may take
longer than a probe should: an engine whose threads compute meanwhile counts as alive, and a request's duration is left
to the request's own deadlines. One that neither answers nor computes is stopped, or waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from sglang.srt.managers.io_struct import SlowDownReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

POLL_S = 0.5


class LivenessProbe:
    """Probes an engine, one question at a time; `threads` are its computing threads, one a rank, by their `stat`."""

    def __init__(
        self, ask: Callable[[], Coroutine[None, None, None]], threads: Sequence[Path], *, independent: bool = False
    ) -> None:
        self._ask = ask
        self._threads = threads
        self._suffices = any if independent else all
        self._outputs = 0  # the number of outputs so far
        self._question: asyncio.Task[None] | None = None

    def on_output(self) -> None:
        """Note that something has been computed."""
        self._outputs += 1

    async def probe(self, *, running: bool) -> None:
        """Wait until anything comes from now on, or all threads have computed while requests run.

        Of `independent` threads, some perhaps without a request, one that has computed is enough.
        """
        outputs, computed = self._outputs, self._computed()
        if self._question is None or self._question.done():
            self._question = asyncio.get_running_loop().create_task(self._ask())
        while self._outputs == outputs and not self._question.done():
            await asyncio.wait({self._question}, timeout=POLL_S)
            if running and self._suffices(map(int.__lt__, computed, self._computed())):
                return

    def _computed(self) -> list[int]:
        """Return the processor time of each thread, in ticks of the kernel's clock."""
        return [_ticks(thread) for thread in self._threads]


def scheduler_probe(manager: TokenizerManager, schedulers: Sequence[int], ranks: int = 1) -> LivenessProbe:
    """Return the probe of an engine's scheduler; `schedulers` are its processes.

    With several data-parallel `ranks` the first process is their controller. All ranks have to answer a question, but
    one that is stopped while others compute is left to its canary and to the deadlines of its requests.
    """

    async def ask() -> None:
        # A request that changes nothing: SGLang's tests slow the scheduler down by it, and None means not at all.
        await manager.slow_down(SlowDownReqInput(forward_sleep_time=None))

    computing = schedulers[1:] if ranks > 1 else schedulers
    return LivenessProbe(ask, [thread_of(pid, pid) for pid in computing], independent=ranks > 1)


def thread_of(process: int, thread: int) -> Path:
    """Return where the kernel counts the processor time of a thread, by its id in its process."""
    return Path(f"/proc/{process}/task/{thread}/stat")


def _ticks(stat: Path) -> int:
    with suppress(OSError):  # the process has ended, which the watchdog notices as well
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
