"""Engines of the simulator: an answer is a function of what its engine was given, images and videos included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from attrs import define, frozen

from actors.engines.simulated.output import OutputSequence
from protocol.errors import BadRequest, EngineRefused, Overloaded
from protocol.messages.generation import Generate, Logprob
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF
from protocol.messages.weights import UpdateWeightsFromTensors
from tests.rig.fake_engine import FakeEngine, Predictable, Scheduler, logprob_at, prompt_of, token_at
from tests.rig.fake_host import FakeHost
from tests.system.simulator.model import VOCABULARY
from tests.system.simulator.pictures import seen

OF_REQUESTS = frozenset({"folder", "version"})
"""Fields of operations that only an engine can check, as it alone can check a file of tensors."""


@frozen
class SeeingOutput(Predictable):
    """The output that `tests.system.simulator.model` computes; no placeholder is among it."""

    seen: Callable[[Generate], tuple[int, ...]] = prompt_of

    def answer(self, request: Generate, prompt: bytes) -> OutputSequence:
        return OutputSequence(self._ids(request), frozenset(request.sampling.stop_token_ids), b"", greedy=True)

    def _ids(self, request: Generate) -> Iterator[int]:
        seed = request.sampling.seed
        prompt = [
            *self.seen(request),
            *([] if seed is None else [seed]),
        ]  # a decode sees it when its first token is due
        for place in count(request.resumed_tokens):
            yield token_at(prompt, place, VOCABULARY)

    def logprob(self, sequence: OutputSequence, place: int, token: int, top: int) -> Logprob:
        return logprob_at(token, place - 1, top, VOCABULARY)


@define(eq=False)
class SeeingScheduler(Scheduler):
    """A scheduler that knows what its model sees of each prompt."""

    def prompt_of(self, request: Generate) -> tuple[int, ...]:
        return tuple(seen(prompt_of(request), request.media))


class SeeingEngine(FakeEngine):
    """An engine whose answers are about what it sees."""

    scheduler_of = SeeingScheduler  # type: ignore[mutable-override]

    async def operate(self, request: Message) -> Message:
        """Carry out an operation, which its node has checked: no wrong order may reach an engine."""
        try:
            return await super().operate(request)
        except (BadRequest, EngineRefused, Overloaded) as error:
            by_content = error.param in OF_REQUESTS or isinstance(request, UpdateWeightsFromTensors)
            if OPERATION_OF[type(request)].leaves_service and not (isinstance(error, BadRequest) and by_content):
                raise AssertionError(f"a wrong order has reached an engine: {request}: {error}") from None
            raise

    def make_output(self) -> Predictable:
        return SeeingOutput(self.spec, seen=self._seen)

    def _seen(self, request: Generate) -> tuple[int, ...]:
        return self.scheduler.prompt_of(request)


@define(eq=False)
class SeeingHost(FakeHost):
    """The host of such an engine."""

    def _engine(self) -> FakeEngine:
        return SeeingEngine(self.costs)
