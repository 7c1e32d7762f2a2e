"""The flush of the prefix caches of all ranks: SGLang's own tells of the first rank alone.

A scheduler tells of the end of a request before it has left the request's last step, so for a moment it is not idle
though no request runs. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

IDLE_WITHIN_S = 5.0  # a scheduler without requests looks once a second whether it is idle


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
