"""The cached prefixes of waiting requests: touched whenever prompts may begin, so that they are evicted last.

A router gives a request to the worker that has its prefix. The scheduler holds that only once there is room in a step
for the request, and until then the prompts before it take the memory that was used least recently, which may be just
this prefix. SGLang touches the prefixes of all waiting requests in every 32nd pass alone, as each look-up costs time.
Here those of the next few are touched in every pass that may begin a prompt, the first one last: what is needed first
is evicted last. With a `schedule_policy` that knows the cache, SGLang itself looks all of them up in each pass. Written
for SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from protocol.cost import PROTECTED_MAX


class SchedulePolicy(Protocol):
    """SGLang's `SchedulePolicy`, which orders the waiting requests before a step is formed."""

    def _touch_waiting_prefixes(self, policy: object, waiting_queue: Sequence[object]) -> None: ...


class SchedulePolicies(Protocol):
    """SGLang's module `schedule_policy`."""

    SchedulePolicy: type[SchedulePolicy]
    WAITING_PREFIX_REFRESH_INTERVAL: int  # passes


def touch_next(policies: SchedulePolicies) -> None:
    """Let the schedulers of this process touch what the next requests are to find; to be called once.

    Where a touch has no effect or does harm, as by another rule of eviction, SGLang still touches nothing.
    """
    touch = policies.SchedulePolicy._touch_waiting_prefixes  # noqa: SLF001

    def touch_first(self: SchedulePolicy, policy: object, waiting_queue: Sequence[object]) -> None:
        touch(self, policy, waiting_queue[:PROTECTED_MAX])

    policies.SchedulePolicy._touch_waiting_prefixes = touch_first  # type: ignore[method-assign]  # noqa: SLF001
    policies.WAITING_PREFIX_REFRESH_INTERVAL = 1
