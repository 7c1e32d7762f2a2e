"""SGLang behind the engine port."""

from __future__ import annotations

from typing import final

from attrs import define

from actors.engines.hosted_engine import HostedEngine
from actors.engines.sglang.hand_off import check_place


@final
@define(eq=False)
class SglangEngine(HostedEngine):
    """One SGLang engine."""

    def check_hand_off(self, hand_off: bytes) -> None:
        """Raise `HandOffFailed` for a rendezvous at another prefill."""
        check_place(hand_off, self.info)
