"""Operators of the simulator, who have engines carry out operations while clients send requests.

An operator asks by the gateway's HTTP with an admin key, or as the command line does, and leaves now and then before the
answer. Whatever an operator leaves behind, memory released or a session of updates open, is put right again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import attrs
import trio
from attrs import define, field

from protocol.errors import NotReady, RequestError
from protocol.messages.cluster import Leg
from protocol.messages.kind import Message
from protocol.messages.leaving import LeavingRequest, RunningRequests
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_OF
from protocol.messages.weights import SetWeightsVersion, WeightsUpdate
from supervisor.cluster import operations
from tests.rig.gateway import head, post
from tests.system.simulator import judge
from tests.system.simulator.clients import GONE, Reader
from tests.system.simulator.faults import ALLOWED_ERRORS, AWAY_ERRORS, LOST, OF_NODES, Faults
from tests.system.simulator.programs import ADMIN_SECRET, BUSY, DONE, REFUSED, UNSUPPORTED, Programs, Step
from tests.system.simulator.system import System

ARRIVES_S = 2.0  # after which what was asked has arrived, or never will
SLACK_S = 30.0  # beside the limits of an operation: ways, and steps of slow engines
UNDONE = "engine_refused"  # since another engine has refused the same
UNANSWERED, UNKNOWN = "unanswered", "not_found"
REFUSALS = frozenset({REFUSED, BUSY, UNSUPPORTED, UNDONE, "adapter_not_loaded"})

Outcomes = Mapping[str, str]
"""By engine, the word `done` or the code of an error; by `*` that of the whole operation."""


@define(eq=False)
class Operator:
    """One operator, who carries out one program after the other."""

    system: System
    rng: random.Random
    name: str
    faults: Faults
    note: Callable[..., None]
    programs: Programs
    strict: bool = False  # nothing else disturbs the engines
    seen: set[str] = field(factory=set)  # outcomes

    async def live(self) -> None:
        """Carry out some programs."""
        rng = self.rng
        await trio.sleep(rng.random() * 3)
        for _ in range(rng.choice((1, 2, 3))):
            await self.program(self.programs.draw())
            await trio.sleep(rng.random())

    async def program(self, steps: list[Step]) -> None:
        """Ask for each step, and put right what is left; some end in the middle, or when an engine is busy."""
        engine, left = self._engine(steps), False
        for step in steps:
            starting = {name for name, worker in self.system.directory.engines().items() if worker.info is None}
            outcomes = await self._ask(step, engine)
            left = outcomes is None
            if outcomes is None:
                self.note(self.name, OPERATION_OF[type(step.request)].name, "left")
                break
            self.note(self.name, OPERATION_OF[type(step.request)].name, *sorted({*outcomes.values()}))
            self._check(step, outcomes, starting)
            if self.strict and not {*outcomes.values()}.isdisjoint({BUSY, UNSUPPORTED, UNDONE}):
                break
            await trio.sleep(self.rng.choice((0.0, self.rng.random() / 2)))
        if left:
            await trio.sleep(ARRIVES_S)
        await self.system.put_all_right()

    def _engine(self, steps: list[Step]) -> str | None:
        """Draw the engine of a program, None for every engine."""
        names = [name for name, worker in self.system.directory.engines().items() if worker.leg is not Leg.ENCODE]
        if not names:
            return None
        of_one = any(OPERATION_OF[type(step.request)].scope is OperationScope.ONE for step in steps)
        return self.rng.choice(names) if of_one or self.rng.random() < 0.6 else None

    async def _ask(self, step: Step, engine: str | None) -> Outcomes | None:
        """Have a step carried out; return None if the operator has left before its end."""
        rng, row = self.rng, OPERATION_OF[type(step.request)]
        if row.leaves_service:
            self.faults.happened.add("operation")
        patience_s = rng.choice((0.0, rng.random() * 0.3)) if row.leaves_service and rng.random() < 0.2 else 1e4
        asked_at = self._age()
        by_http = row.path is not None and rng.random() < 0.5
        with trio.move_on_after(patience_s) as patience:
            outcomes = await (self._by_http if by_http else self._as_command)(row, step.request, engine)
        if patience.cancelled_caught:
            return None
        assert self._age() - asked_at <= row.answered_within_s(step.request) + SLACK_S, "an operation took too long"
        return outcomes

    def _age(self) -> float:
        """Return the time, without the jumps of the clock."""
        return trio.current_time() - self.faults.releases.jumped_s

    # Ways to ask ---------------------------------------------------------------------------

    async def _as_command(self, _: EngineOperation, request: Message, engine: str | None) -> Outcomes:
        """Ask as a node does for the command line."""
        try:
            outcomes = await operations.operate(self.system.directory, request, engine)
        except RequestError as error:
            return {"*": error.code}
        return {name: each.code if isinstance(each, RequestError) else DONE for name, each in outcomes.items()}

    async def _by_http(self, row: EngineOperation, request: Message, engine: str | None) -> Outcomes:
        """Ask by the gateway; an operation without a result has one outcome for all engines."""
        assert row.path is not None
        path, received = f"{row.path}{'' if engine is None else f'?engine={engine}'}", judge.Received()
        headers = {"authorization": f"Bearer {ADMIN_SECRET}"}
        body: Any = b"" if not row.has_fields else attrs.asdict(request)  # type: ignore[arg-type]  # of an attrs class
        if row.takes_file:
            (file,) = request.tensors
            body = bytes(file.data)
        asked = post(body, path, **headers) if "POST" in row.methods else head("GET", path, **headers)
        with suppress(*GONE):
            reader = Reader(self.system.connect())
            try:
                await reader.send(asked)
                await reader.read_answer(received)
            finally:
                reader.hang_up()
        if not received.whole:
            return {"*": UNANSWERED}
        if received.status == 200:
            engines = {"*": DONE} if row.answer_text else dict.fromkeys(json.loads(received.body), DONE)
            return engines or {"*": DONE}
        answer = json.loads(received.body)
        judge.error(answer["error"], lambda _: True, received)
        if "engines" not in answer:
            return {"*": answer["error"]["code"]}
        return {name: each["error"]["code"] if "error" in each else DONE for name, each in answer["engines"].items()}

    # Checks ----------------------------------------------------------------------------------

    def _check(self, step: Step, outcomes: Outcomes, starting: AbstractSet[str]) -> None:
        """Check that each engine has an outcome: without disturbances the right one, else one that they allow.

        An engine that was `starting` when it was asked may have refused.
        """
        assert outcomes or self._may(UNKNOWN), f"no engine was asked for {step.request}"
        self.seen.update(outcomes.values())
        for name, outcome in outcomes.items():
            found = step.outcomes | {*outcomes.values()}
            may_differ = isinstance(step.request, WeightsUpdate | SetWeightsVersion)  # after an update of one alone
            undone = outcome == UNDONE and (may_differ or not found.isdisjoint({BUSY, UNSUPPORTED, REFUSED}))
            right = undone or outcome in self._right(step, name)
            refused = outcome == NotReady.code and name in {*starting, "*"} and bool(starting)
            allowed = right if self.strict else refused or self._may(outcome)
            assert allowed, f"{name}: {outcome} is not allowed: {step.request}"

    def _right(self, step: Step, engine: str) -> frozenset[str]:
        """Return the outcomes that a step may have at an engine that nothing else disturbs.

        A leg holds no requests, and an encoder's embeddings are dropped at any time.
        """
        worker = self.system.directory.engines().get(engine)
        holds = isinstance(step.request, LeavingRequest) and step.request.running is RunningRequests.HOLD
        if worker is None or worker.leg is Leg.BOTH or not (holds or worker.leg is Leg.ENCODE):
            return step.outcomes
        return frozenset({DONE if worker.leg is Leg.ENCODE else UNSUPPORTED})

    def _may(self, outcome: str) -> bool:
        """Whether an operation may have this outcome: any refusal, since operators disturb each other."""
        happened = self.faults.happened
        caused = any(outcome in ALLOWED_ERRORS[kind] for kind in happened)
        if outcome == UNKNOWN:  # an engine of a node that has joined, and is away; a drain of this one ends its links
            return bool(happened & {*OF_NODES, "drain", "jump"})
        over = bool(happened & {"drain", "front crash"}) and outcome in LOST | AWAY_ERRORS
        return outcome in {DONE, *REFUSALS} or caused or over
