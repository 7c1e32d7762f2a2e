"""The router of a model as its section of `cluster.toml` configures it, the feed of its policy, and their gauges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import trio

from actors.kit.direct import DirectCalls
from actors.router import router
from actors.routing.policies.feed import Feed
from actors.routing.route import FailoverLimits
from actors.routing.routing import Routing
from protocol.messages.cluster import EjectionState
from protocol.messages.generation import Finished, Generate, Started, Tokens
from supervisor.config.sections import ModelSection
from supervisor.engines.work import RequestInbox
from supervisor.supervision.tree import Backoff, Child, Tree
from supervisor.telemetry.registry import Registry, Samples


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


def feed_child(name: str, feed_name: str, feed: Feed) -> Tree:
    """Return the child that runs the feed of a model's policy, in a tree of its own: it fails no other."""
    child = Child(name="subscriber", run=feed.run, about=feed.about, limits=feed.limits)
    return Tree(
        name=f"{feed_name}-{name.replace('/', ':')}",
        children=(child,),
        restarts_max=None,
        backoff=Backoff(crashes=True),
        about=f"the feed of the policy of {name}",
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
    """Define the gauge that is 1 for each ejected worker or pair."""
    registry.add_gauge(
        name="espalier_workers_ejected",
        about="Whether a worker is ejected",
        labels="model worker",
        read=lambda: [((ejection.model, ejection.worker), 1.0) for ejection in ejected(routings)],
    )


def add_feed_gauges(registry: Registry, feeds: Mapping[str, Feed]) -> None:
    """Define the gauges of the feeds of models, each labelled with its model."""
    gauges = [(model, gauge) for model, feed in feeds.items() for gauge in feed.gauges]
    for gauge in {gauge.name: gauge for _, gauge in gauges}.values():
        of_models = {model: each.read for model, each in gauges if each.name == gauge.name}
        registry.add_gauge(
            name=gauge.name,
            about=gauge.about,
            labels="model",
            read=partial(_samples, of_models),
        )


def _samples(reads: Mapping[str, Callable[[], float]]) -> Samples:
    return [((model,), float(read())) for model, read in reads.items()]
