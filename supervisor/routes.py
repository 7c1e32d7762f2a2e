"""How the requests of a model are routed, as its section of `cluster.toml` says."""

from __future__ import annotations

from actors.router import router
from actors.routing.route import Limits, Routing
from supervisor.sections import ModelSection
from supervisor.tree import Child
from supervisor.workers import Work

LIMITS = ("resumes_max", "drains_max", "crashes_max", "resume_tokens_max", "resume_s")
ROUTED = ("prefill_tokens_min", *LIMITS)
"""What a reload may change."""


def limits(section: ModelSection) -> Limits:
    """Return how far a request of the model goes on after the loss of a worker."""
    return Limits(**{name: getattr(section, name) for name in LIMITS})


def child(name: str, section: ModelSection, inbox: Work, routing: Routing) -> Child:
    """Return the router of a model."""
    return Child(
        name=f"router-{name.replace('/', ':')}",
        run=router,
        args=(inbox, routing),
        about=f"to the least loaded worker of {name}",
        limits=(
            ("queue", section.queue_max),
            *((key.replace("_", " ").removesuffix(" max"), getattr(section, key)) for key in ROUTED),
        ),
    )
