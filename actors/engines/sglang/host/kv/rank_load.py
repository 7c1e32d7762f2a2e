"""The load of a rank from the numbers of SGLang's scheduler."""

from __future__ import annotations

from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from protocol.messages.engine import RankLoad


async def rank_loads(manager: TokenizerManager) -> list[RankLoad]:
    """Return the loads of all ranks of an engine, in order."""
    loads: list[LoadSnapshot] = await manager.get_loads()
    return [rank_load(load) for load in sorted(loads, key=lambda load: load.dp_rank)]


def rank_load(load: LoadSnapshot) -> RankLoad:
    """Return the load of one rank."""
    return RankLoad(
        running=load.num_running_reqs,
        slots=load.max_running_requests,
        waiting=load.num_waiting_reqs,
        waiting_tokens=load.num_waiting_uncached_tokens,
        kv_tokens_used=load.num_used_tokens,
        kv_tokens_max=load.max_total_num_tokens,
        hit_rate=round(float(load.cache_hit_rate), 4),
        throughput=round(float(load.gen_throughput), 1),
    )
