"""A hook for measurements: hold the transfer of each KV cache open for a while, as a slow network would.

SGLang has none of its own, and between two engines of one host a transfer is over before anybody could meet it. An
engine whose `environment` does not name `ESPALIER_HOLD_TRANSFER_S` runs SGLang's own code. For Mooncake's transfers,
and for schedulers that are forked from their host, as on a CPU.
"""

from __future__ import annotations

import time
from typing import Protocol

from attrs import frozen
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

VARIABLE = "ESPALIER_HOLD_TRANSFER_S"
SENDS = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request"
LOOK_S = 0.001


class _Manager(Protocol):
    request_status: dict[int, int]


@frozen
class _Held:
    """Stands where SGLang's sender waits for a computation before it reads a piece of the KV memory."""

    manager: _Manager
    room: int
    until: float

    def synchronize(self) -> None:
        """Wait until the time has come; an aborted request waits no more."""
        while time.monotonic() < self.until and self._wanted:
            time.sleep(LOOK_S)

    @property
    def _wanted(self) -> bool:
        return bool(self.manager.request_status.get(self.room, KVPoll.Failed) != KVPoll.Failed)


def delay_transfers(held_s: float) -> None:
    """Let the last piece of each prompt wait so long before it is sent; to be called before the engine is made."""

    def hold(
        manager: _Manager, room: int, indices: object, place: object, last: bool, *more: object, **named: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if last:
            named["wait_event"] = _Held(manager, room, time.monotonic() + held_s)
        return (manager, room, indices, place, last, *more), named

    HookRegistry.register(SENDS, hold, HookType.BEFORE)
