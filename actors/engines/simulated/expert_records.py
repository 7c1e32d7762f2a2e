"""Records of the experts of a simulated engine, which pretends to be a mixture of them.

What a request has taken is counted when it ends: by every token that was computed for it, in each layer. The tokens
are shared among the experts by fixed weights, so the same requests have the same record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import count

import trio
from attrs import define, field

from actors.engines.expert_record import RecordState, record_of, write_files
from actors.engines.simulated.kept_files import SimulatedFiles
from protocol.messages.engine import Done
from protocol.messages.experts import DumpExpertRecord, ExpertRecord, StartExpertRecord, StopExpertRecord
from protocol.messages.generation import Usage
from protocol.messages.kind import Message

LAYERS, PER_TOKEN = 4, 2


@define(eq=False)
class SimulatedExpertRecords:
    """The records of one engine with so many `experts` in each layer."""

    files: SimulatedFiles
    experts: int
    _state: RecordState = field(factory=RecordState)
    _numbers: count[int] = field(factory=lambda: count(1))
    _tokens: int = 0
    _steps: int = 0

    @property
    def handlers(self) -> Mapping[type[Message], Callable[[Message], Awaitable[Message]]]:
        """The handlers of its operations; none without experts."""
        if not self.experts:
            return {}
        return {StartExpertRecord: self._start, StopExpertRecord: self._stop, DumpExpertRecord: self._dump}

    def on_step(self) -> None:
        """Count a step."""
        self._steps += self._state.recording

    def on_end(self, usage: Usage) -> None:
        """Count the tokens of a request that has ended; the last token of its answer was not computed with."""
        if self._state.recording:
            self._tokens += usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1

    async def _start(self, _: Message) -> Done:
        await trio.lowlevel.checkpoint()
        self._state.start()
        self._tokens = self._steps = 0
        return Done()

    async def _stop(self, _: Message) -> Done:
        await trio.lowlevel.checkpoint()
        self._state.stop()
        return Done()

    async def _dump(self, _: Message) -> ExpertRecord:
        await trio.lowlevel.checkpoint()
        self._state.check_dump()
        counts = [self._shares(layer) for layer in range(LAYERS)]
        steps, self._steps, self._tokens = self._steps, 0, 0
        self._state.dumped()
        return record_of(counts, steps, write_files(self.files, f"experts-{next(self._numbers)}", counts))

    def _shares(self, layer: int) -> list[int]:
        """Return the tokens of each expert of a layer."""
        weights = [1 + (expert + layer) % self.experts for expert in range(self.experts)]
        routed, whole = self._tokens * PER_TOKEN, sum(weights)
        shares = [routed * weight // whole for weight in weights]
        shares[0] += routed - sum(shares)
        return shares
