"""The KV events of a step, published before it: what is evicted for it is gone, whether or not it has ended.

SGLang publishes them after a prefill, and routers would expect until then what is no longer there. Written for SGLang
0.5.23; called in the scheduler's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar


class KvEventsPublisher(Protocol):
    """SGLang's `SchedulerKvEventsPublisher`."""

    def publish_kv_events(self) -> object:
        """Publish what has happened since the last time."""


class Scheduler(Protocol):
    """SGLang's `Scheduler`, as far as it publishes."""

    @property
    def kv_events_publisher(self) -> KvEventsPublisher:
        """Its publisher."""


S = TypeVar("S", bound=Scheduler)
P = ParamSpec("P")
Planned = TypeVar("Planned")
Plan: TypeAlias = Callable[Concatenate[S, P], Planned]


def publishing(plan: Plan[S, P, Planned]) -> Plan[S, P, Planned]:
    """Return what plans the next step as `plan` does, and then publishes the KV events: of what was evicted for it."""

    def planned(scheduler: S, /, *arguments: P.args, **named: P.kwargs) -> Planned:
        step = plan(scheduler, *arguments, **named)
        scheduler.kv_events_publisher.publish_kv_events()
        return step

    return planned
