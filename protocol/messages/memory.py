"""The release of an engine's memory by tag, and its return."""

from __future__ import annotations

from attrs import frozen

from protocol.messages.kind import Kind, Message
from protocol.messages.leaving import ALL_TAGS, LeavingRequest, MemoryTag
from protocol.messages.operation import EngineOperation, WeightsSession


@frozen(kw_only=True)
class ReleaseMemory(LeavingRequest):
    """Release memory of an engine, which is out of service until the last tag is back; the result is `MemoryState`."""

    tags: tuple[MemoryTag, ...] = ALL_TAGS


@frozen(kw_only=True)
class ResumeMemory(Message):
    """Give an engine memory back that was released; without `tags`, all of it. The result is `MemoryState`."""

    tags: tuple[MemoryTag, ...] = ()


@frozen
class MemoryState(Message):
    """The memory of an engine after a release or a return: the released tags, and its service in words."""

    released: tuple[MemoryTag, ...]
    service: str  # "in service", or "out of service" with the reason


OPERATIONS = (
    EngineOperation(
        kind=Kind(60, ReleaseMemory, result=MemoryState),
        result_kind=Kind(61, MemoryState),
        name="release-memory",
        participle="released",
        summary="Release memory of every engine by tag; it serves again when all tags are back.",
        within_s=60.0,
        path="/release_memory_occupation",
        session=WeightsSession.OUTSIDE,
        leaves_service=True,
        example={"tags": ["kv_cache", "weights"], "running": "drain", "within_s": 60},
    ),
    EngineOperation(
        kind=Kind(62, ResumeMemory, result=MemoryState),
        name="resume-memory",
        participle="resumed",
        summary="Give every engine released memory back; without tags, all of it.",
        within_s=60.0,
        path="/resume_memory_occupation",
        leaves_service=True,
        example={"tags": ["weights"]},
    ),
)
