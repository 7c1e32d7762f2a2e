"""The cached prefixes of requests that wait: touched as the requests arrive, so that others are evicted before them.

A router gives a request to the worker that has its prefix. The scheduler looks for it once the steps before leave room
for the request, which takes as long as the prompts before it. These take the memory that was used least recently, and
that may be this very prefix. SGLang touches the prefixes of waiting requests in every 32nd pass alone, as each look-up
costs time; here each request costs one more. Written for SGLang 0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Scheduler(Protocol):
    """SGLang's `Scheduler`, which queues requests."""

    tree_cache: object

    def _add_request_to_queue(self, req: object, /, *arguments: object, **named: object) -> None: ...


def touch_on_arrival(
    scheduler: type[Scheduler], touch: Callable[[object, object], None], evicts_oldest: Callable[[], bool]
) -> None:
    """Let the schedulers of this process touch what each request will find in the cache; to be called once.

    `touch` is SGLang's `touch_waiting_prefix`; `evicts_oldest` returns whether the cache evicts what was used least
    recently. By another rule a touch may do harm.
    """
    add = scheduler._add_request_to_queue  # noqa: SLF001

    def added(self: Scheduler, req: object, /, *arguments: object, **named: object) -> None:
        add(self, req, *arguments, **named)
        if evicts_oldest():
            touch(req, self.tree_cache)

    scheduler._add_request_to_queue = added  # type: ignore[method-assign]  # noqa: SLF001
