"""One life of an engine as its operations know it: its state, and what becomes of its requests meanwhile.

An operation that takes the engine out of service is carried out here, one at a time, in steps:

    leave service -> running requests drained, ended or held -> the engine's own part -> back in service, or not

Such an operation is a task of the life and outlives its asker: an engine cannot stop one. Where it leaves the engine
out of service, as a release of memory does, the state keeps it so until another operation has changed the state. A
refusal at any step leaves everything as it was. An operation that fails otherwise, or does not end in time, leaves an
engine of unknown state: `EngineStuck` ends its life, and the next one begins with its whole memory.

An engine with older weights than its model is out of service as well, from the beginning of its life until an update
(`model_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import trio
from attrs import define, evolve, field

from actors.engines.port import Engine
from actors.engines.slots.slots import Slots
from actors.kit.calls import Answer, BugCounter, Call
from protocol.engine_state import EngineState
from protocol.errors import (
    ActorError,
    DeadlineExceeded,
    EngineRefused,
    EngineStuck,
    InternalError,
    Overloaded,
    RequestError,
)
from protocol.messages.engine import Done
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest, RunningRequests
from protocol.messages.operation import EngineOperation
from protocol.messages.weights import BeginWeightsUpdate, EndWeightsUpdate, WeightsUpdate, check_order, recorded
from protocol.weights_record import FIRST_WEIGHTS, WeightsRecord, differ
from supervisor.cluster.model_weights import NewestWeights
from supervisor.supervision.registration import Registration


@define(eq=False)
class EngineLife:
    """One life of an engine: a context that must be open while operations are carried out, in the nursery `tasks`."""

    engine: Engine
    registration: Registration[Engine]
    slots: Sequence[Slots]  # of each rank
    tasks: trio.Nursery
    renew: Callable[[Message], ActorError]  # prepares the next life, and returns the error that ends this one
    newest: NewestWeights = field(factory=NewestWeights)  # of its model
    state: EngineState = EngineState()
    weights: WeightsRecord = FIRST_WEIGHTS
    _service: ExitStack = field(init=False, factory=ExitStack)  # what keeps the engine out of service
    _over: bool = field(init=False, default=False)
    _began_behind: bool = field(init=False, default=False)  # whether its weights were, when the session began

    def __enter__(self) -> Self:
        self.newest.followers.append(self._refresh)
        self._refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self.newest.followers.remove(self._refresh)
        self._service.close()

    async def carry_out(self, operation: EngineOperation, call: Call[Message, Message, Message]) -> None:
        """Carry out an operation while the engine is out of service; raises `EngineStuck` if its state is unknown."""
        with call.answering(BugCounter()) as answer:
            await trio.lowlevel.checkpoint()
            before = self.state
            self._change(before.begun(operation, call.request))
            try:
                if not before.holds:  # else none runs
                    await self._clear(call.request)
                check_order(call.request, self.weights, self.newest.record)
                result = await self._operated(operation, self._complete(call.request), answer)
            except RequestError:
                self._change(before)
                raise
            self._record(call.request, result, answer)
            self._change(before.ended(call.request))
            answer.end(result)

    async def carry_out_in_service(self, operation: EngineOperation, call: Call[Message, Message, Message]) -> None:
        """Carry out an operation beside requests, and publish the engine's info, which may have changed."""
        with call.answering(BugCounter()) as answer:
            await trio.lowlevel.checkpoint()
            self.state.check(operation, call.request)
            check_order(call.request, self.weights, self.newest.record)
            try:
                result = await self.engine.operate(call.request)
                self._record(call.request, result, answer)
                answer.end(result)
            finally:
                self.registration.on_change()

    def _refresh(self) -> None:
        """Apply that the model has newer weights, if the engine serves."""
        if not self.state.reason and self.newest.behind(self.weights):
            self._change(self.state)

    def _record(self, request: Message, result: Message, answer: Answer[Message, Message]) -> None:
        """Record the engine's weights after an operation; raises `EngineStuck` if they are others than wanted."""
        weights = recorded(self.weights, request, result)
        if self._over or weights == self.weights:
            return
        wanted = request.checksum if isinstance(request, WeightsUpdate) else ""
        if wanted and differ(weights.checksum, wanted):
            why = f"the weights of version {weights.version!r} have the checksum {weights.checksum}, not {wanted}"
            answer.fail(EngineRefused(f"{why}; the engine is started again"))
            raise EngineStuck(why)
        self.weights = weights
        self.newest.note(weights)
        self._change(self.state)

    def _complete(self, request: Message) -> Message:
        """Return a request, with the end of a session that began behind the model as one of whole weights alone."""
        if isinstance(request, BeginWeightsUpdate):
            self._began_behind = bool(self.newest.behind(self.weights))
        if isinstance(request, EndWeightsUpdate) and request.version and self._began_behind:
            return evolve(request, whole=True)
        return request

    def _change(self, state: EngineState) -> None:
        """Replace the state, and with it the engine's service and the rest of its requests, in one turn."""
        if self._over:  # the next life has its own
            return
        self.state, before = state, self._service
        self._service = ExitStack()
        if reason := state.reason or self.newest.behind(self.weights):
            self._service.enter_context(self.registration.out_of_service(reason))
        for slots in self.slots:
            if state.holds:
                slots.rest()
            else:
                slots.end_rest()
        before.close()

    async def _clear(self, request: Message) -> None:
        """Wait until running requests are out of the way; raises `Overloaded` if they do not end in time."""
        await trio.lowlevel.checkpoint()
        if not isinstance(request, LeavingRequest) or request.running is RunningRequests.HOLD:
            return
        if request.running is RunningRequests.END:
            for slots in self.slots:
                slots.end_requests(f"the engine {self.registration.status_text}")
        with trio.move_on_after(request.within_s) as waiting:
            await trio.lowlevel.checkpoint()
            for slots in self.slots:
                await slots.wait_empty()
        if waiting.cancelled_caught:
            left = sum(slots.occupied for slots in self.slots)
            raise Overloaded(f"{left} requests had not ended after {request.within_s:g} s, so nothing was done")

    async def _operated(
        self, operation: EngineOperation, request: Message, answer: Answer[Message, Message]
    ) -> Message:
        """Return the result of the engine's own part; raises its refusal, or `EngineStuck` if its state is unknown.

        Where the operation is a new life, that is prepared instead, and the error that ends this one is raised.
        """
        if operation.renews:
            renewed = self.renew(request)
            answer.end(Done())
            raise renewed
        within_s = 2 * operation.within_s  # the asker has given up, but the engine may only be slow
        try:
            with trio.fail_after(within_s):
                return await self.engine.operate(request)
        except trio.TooSlowError:
            why: RequestError = DeadlineExceeded(f"{operation.name} did not end within {within_s:g} s")
        except InternalError as error:
            why = InternalError(f"{operation.name} failed: {error.detail}")
        except RequestError:  # a refusal, or the engine's life has ended
            raise
        except Exception as error:
            raise EngineStuck(f"{operation.name} failed: {type(error).__name__}") from error
        answer.fail(type(why)(f"{why.detail}; the engine is started again"))
        raise EngineStuck(why.detail)
