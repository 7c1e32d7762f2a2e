"""The KV memory that requests may come to need at one worker, by their owners, as a node counts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define, field

from actors.engines.kv_admission import HeldTokens, kv_tokens_needed
from protocol.cluster import Leg
from protocol.media import Encode
from protocol.messages import EngineInfo, Generate


@define(eq=False)
class OwnerMemory:
    """The memory at one worker.

    A request that waits for memory which only its own owner has is not computed soon, and delays no prompt of others.
    """

    held: HeldTokens = field(factory=HeldTokens)

    @contextmanager
    def added(self, request: Generate | Encode, leg: Leg, info: EngineInfo | None, others: int) -> Iterator[bool]:
        """Count a request in the body, which gets whether it waits for its owner's own.

        `others` are the tokens that requests of other nodes may come to.
        """
        if isinstance(request, Encode) or info is None:
            yield False
            return
        needed = kv_tokens_needed(request, leg, info.page_size)
        waits = info.kv_tokens_max > 0 and self.held.waits_for_own(request.owner, needed, info.kv_tokens_max, others)
        self.held.add(request.owner, needed)
        try:
            yield waits
        finally:
            self.held.add(request.owner, -needed)
