"""Readiness: whether every model can be served now, and a sentence with what is missing.

Two questions that differ. `never_ready` asks what has not come up yet since this node started: until then requests wait
or are refused as `not_ready`. `unready` asks what is missing at this moment, which is what probes and operators see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from protocol.cluster import Leg, Offer
from supervisor.cluster.directory import Directory


def never_ready(directory: Directory, models: Sequence[str]) -> str | None:
    """Return what has not been ready since this node started, None if everything has been."""

    def has_been_up(_: str, offer: Offer) -> bool:
        return offer.engine is not None

    def reason(name: str) -> str:
        return directory.models.rejections.get(name, "is still starting")

    return directory.derived("never ready", lambda: _missing(directory, models, has_been_up, reason))


async def wait_ever_ready(directory: Directory, models: Sequence[str]) -> None:
    """Wait until every model has been ready once."""
    await trio.lowlevel.checkpoint()
    while never_ready(directory, models) is not None:
        await directory.wait_changed()


def unready(directory: Directory, models: Sequence[str]) -> str | None:
    """Return why some model cannot be served now, or why another node refuses this one's name; None if neither."""
    if (conflict := directory.name_conflict) is not None:
        return conflict
    draining, stalled = directory.draining_workers, directory.stalled_workers
    local = {f"{directory.name}/{name}": worker.engine.status_text for name, worker in directory.local.items()}
    remote = {name: offer.why for name, offer in directory.offers_by_name().items() if offer.why}
    unlinked = {name: node.state for name, node in directory.nodes.items() if node.link is None}
    nodes = {f"{node}/{offer.name}": node for node, state in unlinked.items() for offer in state.offers}

    def is_up(name: str, offer: Offer) -> bool:
        return offer.up and name not in draining and name not in stalled

    def reason(name: str) -> str:
        if name in stalled:
            return "is on a node that stands still"
        if name in draining:
            return "is on a node that drains"
        unlinked_node = f"is on node {nodes[name]}, to which there is no link" if name in nodes else None
        return local.get(name) or remote.get(name) or unlinked_node or "is starting"

    return _missing(directory, models, is_up, reason)


def engines_up(directory: Directory) -> dict[str, float]:
    """Return 1 for each engine that can be asked, 0 for the others, by its name in the cluster."""
    stalled = directory.stalled_workers
    return {name: float(offer.up and name not in stalled) for name, offer in directory.offers_by_name().items()}


def _missing(
    directory: Directory, models: Sequence[str], is_up: Callable[[str, Offer], bool], reason: Callable[[str], str]
) -> str | None:
    """Return the first engine that a model lacks, and why, as a sentence; None if no model lacks any."""
    for model in models:
        offers = directory.offers_by_name(model)
        legs = {offer.leg for name, offer in offers.items() if is_up(name, offer)}
        if Leg.BOTH not in legs and not {Leg.PREFILL, Leg.DECODE} <= legs:
            missing = next((name for name, offer in offers.items() if not is_up(name, offer)), None)
            if missing is None:
                return f"model {model} has no engine"
            names = [offer.name for offer in offers.values()]
            name = offers[missing].name
            return f"engine {name if names.count(name) == 1 else missing} {reason(missing)}"
    return None
