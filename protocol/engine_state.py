"""The state of one life of an engine, and the operations that are legal in it.

An engine carries out one operation at a time that takes it out of service, and one whose memory is released stays out
of service afterwards. SGLang ends its process at a wrong order, such as a return of memory that was not released. So
the order is decided here, before the engine gets anything: by its node, and again by the engine itself. There is
neither a clock nor an engine in here.

    in service -> an operation runs -> in service
                      |       ^
                      v       |
              out of service: memory released

A refused operation leaves the state as it was. One that fails otherwise, or does not end, leaves an unknown state: only
the next life of the engine has a known one again, which is the first.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve, frozen

from protocol.errors import BadRequest, Overloaded
from protocol.messages.kind import Message
from protocol.messages.leaving import LEAVES_WITHIN_S_MAX, LeavingRequest, MemoryTag, RunningRequests
from protocol.messages.memory import ReleaseMemory, ResumeMemory
from protocol.messages.operation import EngineOperation, WeightsSession
from protocol.messages.weights import BeginWeightsUpdate, EndWeightsUpdate

IN_SERVICE = "in service"


@frozen
class EngineState:
    """The running operation, the released memory, and whether requests stand still in the engine."""

    operation: str = ""  # the name of the one that runs and keeps the engine out of service
    released: frozenset[MemoryTag] = frozenset()
    holds: bool = False
    updating: bool = False  # whether a session of new weights is open

    @property
    def reason(self) -> str:
        """The reason to be out of service; empty in service."""
        if self.operation:
            return f"{self.operation} runs"
        reasons = [f"memory released: {names(self.released)}"] * bool(self.released)
        reasons += ["its weights are being replaced"] * self.updating
        reasons += ["requests held"] * (self.holds and bool(reasons))
        return ", ".join(reasons)

    @property
    def service(self) -> str:
        """The state in words."""
        return f"out of service: {self.reason}" if self.reason else IN_SERVICE

    @property
    def released_tags(self) -> tuple[MemoryTag, ...]:
        """The released tags, in their usual order."""
        return in_order(self.released)

    def check(self, operation: EngineOperation, request: Message) -> None:
        """Raise the refusal of an operation that is not legal now.

        It is `Overloaded` while another one keeps the engine out of service, and `BadRequest` where the memory of the
        engine forbids it.
        """
        if isinstance(request, LeavingRequest):
            _check_leaving(operation, request)
        if operation.leaves_service and self.operation:
            raise Overloaded(f"it is {self.service}")
        if missing := self.released.intersection(operation.needs):
            raise BadRequest(f"{operation.name} needs memory that is released: {names(missing)}; resume-memory first")
        match request:
            case ReleaseMemory(tags=tags):
                self._check_session(operation)
                if not tags:
                    raise BadRequest("there is nothing to release without a tag", param="tags")
                if again := self.released.intersection(tags):
                    raise BadRequest(f"{names(again)}: released already; resume-memory returns it", param="tags")
            case ResumeMemory(tags=tags):
                if not self.released:
                    raise BadRequest("no memory is released", param="tags")
                if extra := set(tags) - self.released:
                    raise BadRequest(f"{names(extra)}: not released, so it cannot return", param="tags")
            case _:
                self._check_session(operation)

    def _check_session(self, operation: EngineOperation) -> None:
        """Raise `BadRequest` for an operation that a session of new weights forbids, or that needs one."""
        if operation.session is WeightsSession.WITHIN and not self.updating:
            raise BadRequest(f"{operation.name} is for a session of updates: begin-weights-update first")
        if operation.session is WeightsSession.OUTSIDE and self.updating:
            raise BadRequest(f"{operation.name} is not for a session of updates: end-weights-update first")

    def begun(self, operation: EngineOperation, request: Message) -> EngineState:
        """Return the state while a legal operation runs, if it keeps the engine out of service; raises as `check`."""
        self.check(operation, request)
        holds = isinstance(request, LeavingRequest) and request.running is RunningRequests.HOLD
        return evolve(self, operation=operation.name, holds=self.holds or holds)

    def ended(self, request: Message) -> EngineState:
        """Return the state after an operation that was legal in this one and has been carried out.

        Held requests go on when no memory is released any more, and no session is open.
        """
        released, holds, updating = self.released, self.holds, self.updating
        match request:
            case ReleaseMemory(tags=tags, running=running):
                released |= frozenset(tags)
                holds |= running is RunningRequests.HOLD
            case ResumeMemory(tags=tags):
                released -= frozenset(tags or released)
            case BeginWeightsUpdate(running=running):
                updating = True
                holds |= running is RunningRequests.HOLD
            case EndWeightsUpdate():
                updating = False
            case _:
                pass
        return EngineState("", released, holds=holds and bool(released or updating), updating=updating)


def _check_leaving(operation: EngineOperation, request: LeavingRequest) -> None:
    """Raise `BadRequest` for a wait without a limit, and for held requests where the engine ends."""
    if not 0 < request.within_s <= LEAVES_WITHIN_S_MAX:
        raise BadRequest(f"must be above 0 and at most {LEAVES_WITHIN_S_MAX:g}", param="within_s")
    if operation.renews and request.running is RunningRequests.HOLD:
        raise BadRequest(
            f"{operation.name} ends the engine, which then holds no requests: drain or end them", param="running"
        )


def in_order(tags: Collection[MemoryTag]) -> tuple[MemoryTag, ...]:
    """Return tags in their usual order, each once."""
    return tuple(tag for tag in MemoryTag if tag in tags)


def names(tags: Collection[MemoryTag]) -> str:
    """Return the names of tags."""
    return ", ".join(in_order(tags))
