"""The flush of the prefix caches of all ranks: SGLang's own reports the first rank's alone.

A scheduler reports the end of a request before it has left the request's last step, so for a moment it is not idle
though no request runs. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

IDLE_WITHIN_S = 1.0  # the wait for idle schedulers after the last request; far less than the askers' own limit
RETRY_S = 0.01


async def flush(manager: TokenizerManager, within_s: float | None = None) -> str | None:
    """Drop the prefix cache of each rank; return why one could not, because requests run for `within_s`, else None."""
    manager.auto_create_handle_loop()
    results = await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=within_s))
    busy = [result for result in results if not result.success]
    if busy:
        return busy[0].message or "requests run"
    if manager.mm_processor is not None:
        manager.mm_processor.clear_preprocess_cache()
    return None


async def flush_idle(manager: TokenizerManager, any_running: Callable[[], bool]) -> str | None:
    """Drop the caches if no request runs, as soon as all schedulers are idle; return why they were not, else None.

    They are asked again instead of being given the time: each would end a wait by its own clock, some ranks with a
    flush and some without, and until then no other flush could be asked for.
    """
    now = asyncio.get_running_loop().time
    ends_at = now() + IDLE_WITHIN_S
    while (why_not := await flush(manager)) is not None and not any_running() and now() < ends_at:  # noqa: ASYNC110
        await asyncio.sleep(RETRY_S)
    return why_not
