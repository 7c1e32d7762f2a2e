"""A plugin of SGLang for measurements: delay the transfer of each KV cache, as a slow network would.

SGLang has no such hook, and between two engines of one host a transfer is over before a test could abort it. SGLang
finds this file by its plugin entry point where this folder is on the PYTHONPATH of a node. An engine whose
`environment` does not set `TRANSFER_DELAY_S` runs SGLang's own code. The hook is for Mooncake's transfers, and for
schedulers that are forked from their host, as on a CPU.
"""

from __future__ import annotations

import os
import time
from typing import Protocol

from attrs import frozen
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

VARIABLE = "TRANSFER_DELAY_S"
HOOKED = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request"
POLL_S = 0.001


class _Manager(Protocol):
    request_status: dict[int, int]


@frozen
class _Delay:
    """The event that SGLang's sender waits for before it reads a piece of the KV memory: here, a moment in time."""

    manager: _Manager
    room: int
    until: float

    def synchronize(self) -> None:
        """Wait until the time has come, or until the request is aborted."""
        while time.monotonic() < self.until and self._wanted:
            time.sleep(POLL_S)

    @property
    def _wanted(self) -> bool:
        return bool(self.manager.request_status.get(self.room, KVPoll.Failed) != KVPoll.Failed)


def activate() -> None:
    """Delay the last piece of each prompt by the seconds that the environment has, if any."""
    if VARIABLE not in os.environ:
        return
    delay_s = float(os.environ[VARIABLE])

    def delay(
        manager: _Manager, room: int, indices: object, place: object, last: bool, *more: object, **named: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if last:
            named["wait_event"] = _Delay(manager, room, time.monotonic() + delay_s)
        return (manager, room, indices, place, last, *more), named

    HookRegistry.register(HOOKED, delay, HookType.BEFORE)
