"""The router of a model as its section of `cluster.toml` configures it, and the gauge of ejected workers."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from actors.kit.direct import DirectCalls
from actors.router import router
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.subscriber import PrefixSubscriber
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.cluster import EjectionState
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.config.sections import ModelSection
from supervisor.engines.work import RequestInbox
from supervisor.supervision.tree import Backoff, Child, Tree
from supervisor.telemetry.registry import Registry


def limits(section: ModelSection) -> FailoverLimits:
    """Return the limits on resuming a request of the model after the loss of a worker."""
    return FailoverLimits(resumes_max=section.resumes_max, resume_s=section.resume_s)


def child(
    name: str,
    section: ModelSection,
    inbox: RequestInbox,
    routing: Routing,
    direct: DirectCalls[Generate, Started | Tokens, Finished],
) -> Child:
    """Return the child that runs the router of a model."""
    return Child(
        name=f"router-{name.replace('/', ':')}",
        run=router,
        args=(inbox, routing, direct),
        about=f"to a worker of {name}, chosen by {section.policy}",
        limits=(
            ("queue", section.queue_max),
            ("prefill tokens min", section.prefill_tokens_min),
            ("resumes", section.resumes_max),
            ("resume s", section.resume_s),
        ),
    )


def subscriber_child(name: str, index: PrefixIndex, subscriber: PrefixSubscriber) -> Tree:
    """Return the child that follows the prefix caches of a model's workers, in a tree of its own: it fails no other."""
    child = Child(
        name="subscriber",
        run=subscriber.run,
        about="what workers have in their prefix caches, for policy kv",
        limits=(("blocks", index.blocks_max),),
    )
    return Tree(
        name=f"prefixes-{name.replace('/', ':')}",
        children=(child,),
        restarts_max=None,
        backoff=Backoff(crashes=True),
        about=f"the prefix index of {name}",
    )


def ejected(routings: Mapping[str, Routing]) -> tuple[EjectionState, ...]:
    """Return the ejected workers of every model that is routed here."""
    now = trio.current_time()
    return tuple(
        EjectionState(model, ejection.name, ejection.why, round(ejection.for_s, 3))
        for model, routing in routings.items()
        for ejection in routing.outliers.ejected(now)
    )


def add_ejected_gauge(registry: Registry, routings: Mapping[str, Routing]) -> None:
    """Define the gauge that is 1 for each worker, or pair, that is ejected."""
    registry.add_gauge(
        *("espalier_workers_ejected", "Whether a worker is ejected", "model worker"),
        lambda: [((ejection.model, ejection.worker), 1.0) for ejection in ejected(routings)],
    )


def add_index_gauges(
    registry: Registry, indexes: Mapping[str, PrefixIndex], subscribers: Mapping[str, PrefixSubscriber]
) -> None:
    """Define the gauges of the prefix index of each model."""
    registry.add_gauge(
        *("espalier_prefix_index_blocks", "Blocks in the prefix index", "model"),
        lambda: [((model,), float(index.statistics().blocks)) for model, index in indexes.items()],
    )
    registry.add_gauge(
        *("espalier_prefix_index_workers_unknown", "Workers whose blocks the index does not have", "model"),
        lambda: [((model,), float(len(subscriber.unknown))) for model, subscriber in subscribers.items()],
    )
