"""SGLang behind the engine port."""

from __future__ import annotations

from typing import final

from attrs import define, field

from actors.engines.hosted_engine import HostedEngine
from actors.engines.sglang import hand_off
from protocol.errors import HandOffFailed, Unsupported
from protocol.messages.engine import HandOff
from protocol.messages.generation import Generate


@final
@define(eq=False)
class SglangEngine(HostedEngine):
    """One SGLang engine."""

    _states: dict[str, bytes] = field(factory=dict)  # that decodes have taken, by the ids of their requests

    def check_hand_off(self, request: Generate) -> None:
        """Raise `HandOffFailed` for a rendezvous at another prefill, and for a state of another prompt or one in use.

        Raises `Unsupported` for the log probabilities of a prompt whose prefill returns a state.
        """
        hand_off.check_hand_off(request, self.info)
        if self.info.returns_states and request.prompt_logprobs:
            raise Unsupported("SGLang has no log probabilities of prompts in a sequential hand-off", param="echo")
        if self.info.hand_off is HandOff.SEQUENTIAL and self.info.is_decode:
            self._states = {id_: state for id_, state in self._states.items() if id_ in self.streams}
            if request.hand_off in self._states.values():
                raise HandOffFailed("the state has been used by another decode")
            self._states[request.id] = request.hand_off
