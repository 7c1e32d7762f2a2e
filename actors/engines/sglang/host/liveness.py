"""The liveness of SGLang's schedulers: the probe of an engine, by a question that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.io_struct import SlowDownReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from actors.engines.host.liveness import LivenessProbe, thread_of


def scheduler_probe(manager: TokenizerManager, schedulers: Sequence[int], ranks: int = 1) -> LivenessProbe:
    """Return the probe of an engine's scheduler; `schedulers` are its processes.

    With several data-parallel `ranks` the first process is their controller. All ranks have to answer a question, but
    one that is stopped while others compute is left to its canary and to the deadlines of its requests.
    """

    async def ask() -> None:
        # A request that changes nothing: SGLang's tests slow the scheduler down by it, and None means not at all.
        await manager.slow_down(SlowDownReqInput(forward_sleep_time=None))

    computing = schedulers[1:] if ranks > 1 else schedulers
    threads = [thread_of(pid, pid) for pid in computing]
    return LivenessProbe(ask, threads, processes=schedulers, independent=ranks > 1)
