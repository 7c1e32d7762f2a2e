"""Operations that take an engine out of service: what becomes of its running requests, and the tags of its memory."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from protocol.messages.kind import Message

LEAVES_WITHIN_S_MAX = 3600.0


class RunningRequests(StrEnum):
    """The ways with the running requests of an engine that leaves service."""

    DRAIN = "drain"  # they go on to their ends, which are waited for
    END = "end"  # they end, and go on with another worker where there is one
    HOLD = "hold"  # they stand still in the engine, and go on once it is back in service


class MemoryTag(StrEnum):
    """A part of an engine's memory that can be released by itself."""

    KV_CACHE = "kv_cache"
    WEIGHTS = "weights"
    CUDA_GRAPH = "cuda_graph"


ALL_TAGS = tuple(MemoryTag)


@frozen(kw_only=True)
class LeavingRequest(Message):
    """The request of an operation that needs the engine's running requests out of its way."""

    running: RunningRequests = RunningRequests.DRAIN
    # the longest wait for the ends of running requests; then the operation is refused, and the engine serves on
    within_s: float = 60.0
