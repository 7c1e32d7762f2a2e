"""The hand-off of a pair, as its router makes it: a rendezvous for both legs, by the prefill's kind."""

from __future__ import annotations

from collections.abc import Mapping

from actors.kit.hand_off import KindHandOff
from actors.routing.ports import Worker
from protocol.errors import HandOffFailed
from protocol.messages.cluster import engine_and_rank


def rendezvous(prefill: Worker, kinds: Mapping[str, KindHandOff], number: int) -> bytes:
    """Return the bytes with which both legs are asked; raises `HandOffFailed` if there are none for this prefill."""
    info = prefill.info
    if info is None or info.hand_off_address is None:  # it was there when the prefill was chosen
        raise HandOffFailed(f"prefill {prefill.full_name} no longer announces its hand-off")
    if (kind := kinds.get(info.kind)) is None:
        raise HandOffFailed(f"this node cannot make a hand-off of the kind of prefill {prefill.full_name}")
    _, rank = engine_and_rank(prefill.full_name)
    return kind.rendezvous(info, rank=rank, number=number)
