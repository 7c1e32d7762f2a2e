"""The hand-off of one attempt by a pair: the bytes for each leg, and the time for which the prefill's call stays open.

Both kinds of hand-off have the legs in one nursery, with a place reserved at the decode. In a sequential hand-off the
decode is asked later, once the prefill has returned a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio
from attrs import define, field

from actors.kit.hand_off import KindHandOff
from actors.routing.ports import Worker
from protocol.errors import HandOffFailed
from protocol.messages.cluster import engine_and_rank
from protocol.messages.engine import HandOff
from protocol.messages.generation import PromptScores, Started, Tokens


@define(eq=False)
class PairHandOff:
    """The hand-off between the two legs of a request: bytes for each, which no router reads."""

    prefill: Worker
    for_prefill: bytes
    is_sequential: bool
    lease: trio.CancelScope = field(factory=trio.CancelScope)  # of the state: the prefill's call lasts as long
    scores: PromptScores | None = None  # the prompt's, once the prefill has begun to answer
    _state: bytes = b""
    _begun: trio.Event = field(factory=trio.Event)
    _kept: list[Started | Tokens] = field(factory=list)
    _receive: Callable[[Started | Tokens], None] | None = None

    @classmethod
    def of(cls, prefill: Worker, kinds: Mapping[str, KindHandOff], number: int) -> PairHandOff:
        """Return the hand-off of a prefill, by its kind; raises `HandOffFailed` if it allows none."""
        info = prefill.info
        if info is None or info.hand_off_address is None:  # it was there when the prefill was chosen
            raise HandOffFailed(f"prefill {prefill.full_name} no longer announces its hand-off")
        if info.hand_off is HandOff.SEQUENTIAL:
            return cls(prefill, b"", is_sequential=True)
        kind = kinds.get(info.kind)
        if kind is None or kind.rendezvous is None:
            raise HandOffFailed(f"this node cannot make a hand-off of the kind of prefill {prefill.full_name}")
        _, rank = engine_and_rank(prefill.full_name)
        return cls(prefill, kind.rendezvous(info, rank=rank, number=number), is_sequential=False)

    async def state(self) -> bytes:
        """Wait for the state that a sequential prefill returns, and return it."""
        await self._begun.wait()
        return self._state

    def behind_scores(self, receive: Callable[[Started | Tokens], None]) -> Callable[[Started | Tokens], None]:
        """Return a receiver of the decode's replies that keeps them until the prefill has begun to answer."""
        self._receive = receive
        return self._receive_or_keep

    def _receive_or_keep(self, reply: Started | Tokens) -> None:
        assert self._receive is not None
        if self._begun.is_set():
            self._receive(reply)
        else:
            self._kept.append(reply)

    async def wait_begun(self) -> None:
        """Wait until the prefill has begun to answer, and the kept replies have been passed on."""
        await self._begun.wait()

    def begun(self, started: Started) -> None:
        """Note that the prompt is computed, its scores and its state; raises `HandOffFailed` if a state is missing."""
        if self.is_sequential and not started.hand_off:
            raise HandOffFailed(f"prefill {self.prefill.full_name} returned no state")
        self._state, self.scores = started.hand_off, started.scores
        self._begun.set()
        kept, self._kept = self._kept, []
        for reply in kept:
            self._receive_or_keep(reply)

    def taken(self) -> None:
        """Note that the decode has the KV cache: the prefill is left, which frees the state."""
        if self.is_sequential:
            self.lease.cancel(reason="the decode has the KV cache")

    def ended(self) -> None:
        """Raise `HandOffFailed` if a prefill has ended whose state the decode has not taken."""
        if self.is_sequential and not self.lease.cancel_called:
            raise HandOffFailed(f"prefill {self.prefill.full_name} ended before the decode had the KV cache")
