"""TensorRT-LLM behind the engine port."""

from __future__ import annotations

from typing import final

from attrs import define, field

from actors.engines.hosted_engine import HostedEngine
from actors.engines.trtllm.handed import TakenStates, read_state
from protocol.errors import HandOffFailed
from protocol.messages.generation import Generate


@final
@define(eq=False)
class TrtllmEngine(HostedEngine):
    """One TensorRT-LLM engine."""

    _taken: TakenStates = field(factory=TakenStates)

    def check_hand_off(self, request: Generate) -> None:
        """Raise `HandOffFailed` for a state of another prompt or engine, and for a used one."""
        if self.info.returns_states and request.hand_off:
            raise HandOffFailed("a prefill of this kind is asked without a hand-off")
        if self.info.is_decode and read_state(request, self.info) is not None:
            self._taken.take(request.hand_off)
