"""The cached prefixes of waiting requests: touched before each step with prompts, so that they are evicted last.

A router gives a request to the worker that has its prefix. The scheduler holds that only once there is room in a step
for the request, and until then the prompts before it take the memory that was used least recently, which may be just
this prefix. SGLang touches the prefixes of all waiting requests in every 32nd pass alone, as each look-up costs time.
Here those of the next few are touched in every pass, the first one last: what is needed first is evicted last. Written
for SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from protocol.cost import PROTECTED_MAX


class SchedulePolicy(Protocol):
    """SGLang's `SchedulePolicy`, which orders the waiting requests before a step is formed."""

    tree_cache: object

    def calc_priority(self, waiting_queue: Sequence[object], *arguments: object, **named: object) -> None: ...  # noqa: D102


def touch_next(
    policy: type[SchedulePolicy], touch: Callable[[object, object], None], evicts_oldest: Callable[[], bool]
) -> None:
    """Let the schedulers of this process touch what the next requests are to find; to be called once.

    `touch` is SGLang's `touch_waiting_prefix`; `evicts_oldest` returns whether the cache evicts what was used least
    recently. By another rule a touch may do harm.
    """
    order = policy.calc_priority

    def ordered(self: SchedulePolicy, waiting_queue: Sequence[object], *arguments: object, **named: object) -> None:
        order(self, waiting_queue, *arguments, **named)
        if evicts_oldest():
            for request in reversed(waiting_queue[:PROTECTED_MAX]):
                touch(request, self.tree_cache)

    policy.calc_priority = ordered  # type: ignore[method-assign]
