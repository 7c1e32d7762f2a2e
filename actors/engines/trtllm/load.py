"""The load of an engine from TensorRT-LLM's statistics, which it counts in blocks and for each iteration.

None come before the first answer, nor while nothing is computed: a rank at rest is known by its requests alone. So its
last statistics are forgotten by `rest`. A number that is missing, as in an older version, counts as 0.

With several ranks an iteration has a record of each. Those of all ranks but the first repeat the first one's KV memory
and waiting requests: such a rank is known by the tokens of what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from attrs import define, field

from protocol.messages.engine import RankLoad

KV, BATCH = "kvCacheStats", "inflightBatchingStats"
RUNNING = ("numContextRequests", "numGenRequests")
WAITING = ("numQueuedContextRequests", "numQueuedGenRequests", "numPausedRequests")
WAITING_TOKENS = ("numQueuedCtxTokens",)
TOKENS = ("numCtxTokens", "numCtxKvTokens", "numGenKvTokens")


@define
class RankStatistics:
    """The loads of an engine's ranks by their last statistics; each has `slots`, and memory for `kv_tokens_max`."""

    ranks: int
    slots: int
    page_size: int
    kv_tokens_max: int
    _loads: dict[int, RankLoad] = field(init=False, factory=dict)

    @property
    def loads(self) -> list[RankLoad]:
        """The load of each rank in order."""
        return [self._loads.get(rank, self._at_rest) for rank in range(self.ranks)]

    def note(self, stats: Mapping[str, object]) -> bool:
        """Take the statistics of one iteration of one rank; False for a rank that the engine does not have."""
        rank = _number(stats, "attentionDpRank")
        if rank >= self.ranks:
            return False
        batch, memory = _part(stats, BATCH), _part(stats, KV) if rank == 0 else {}
        block_tokens = _number(memory, "tokensPerBlock") or self.page_size
        seconds = _share(stats, "iterLatencyMS") / 1000
        generating = _number(batch, "numGenRequests")
        self._loads[rank] = RankLoad(
            running=_sum(batch, RUNNING),
            slots=self.slots,
            waiting=_sum(batch, WAITING),
            waiting_tokens=_sum(batch, WAITING_TOKENS),
            kv_tokens_used=_number(memory, "usedNumBlocks") * block_tokens if rank == 0 else _sum(batch, TOKENS),
            kv_tokens_max=_number(memory, "maxNumBlocks") * block_tokens or self.kv_tokens_max,
            hit_rate=min(1.0, _share(memory, "cacheHitRate")),
            throughput=generating / seconds if seconds else 0.0,
        )
        return True

    def rest(self, rank: int) -> None:
        """Note the end of a rank's last request: no statistics of it will come."""
        self._loads.pop(rank, None)

    @property
    def _at_rest(self) -> RankLoad:
        return RankLoad(slots=self.slots, kv_tokens_max=self.kv_tokens_max)


def _part(stats: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = stats.get(name)
    return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}


def _number(stats: Mapping[str, object], name: str) -> int:
    found = stats.get(name)
    return found if isinstance(found, int) and found > 0 else 0


def _share(stats: Mapping[str, object], name: str) -> float:
    found = stats.get(name)
    return found if isinstance(found, int | float) and found > 0 else 0.0  # NaN is not above 0


def _sum(stats: Mapping[str, object], names: tuple[str, ...]) -> int:
    return sum(_number(stats, name) for name in names)
