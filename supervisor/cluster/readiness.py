"""Readiness: whether every model can be served now, and a sentence with what is missing.

Three different questions. `never_ready`: what has not come up yet since this node started? Until then requests wait or
are refused as `not_ready`. `unready`: what is missing at this moment, for probes and operators? Both are about text
alone: without an encoder, requests without images are served as ever, and a load balancer must not take the gateway
out. `without_encoders`: what is missing then?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import trio

from protocol.messages.cluster import Leg, Offer, serve_text
from protocol.pairing import Pairing
from supervisor.cluster.directory import Directory

IsUp: TypeAlias = Callable[[str, Offer], bool]
DownReason: TypeAlias = Callable[[str], str]
"""Why a worker of a name in the cluster is not up, as the end of a sentence."""


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
    is_up, reason = _now(directory)
    return _missing(directory, models, is_up, reason)


def without_encoders(directory: Directory, models: Sequence[str]) -> str | None:
    """Return which model takes no images and videos now, because no encoder of it is up; None if none lacks any."""
    is_up, reason = _now(directory)
    for model in models:
        offers = _by_name(directory, model, lambda leg: leg is Leg.ENCODE)
        if offers and not any(is_up(name, offer) for name, offer in offers.items()):
            return f"model {model} takes no images and videos: {_first_missing(offers, is_up, reason)}"
    return None


def _now(directory: Directory) -> tuple[IsUp, DownReason]:
    """Return whether a worker can be asked at this moment, and why not, by its name and its offer."""
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

    return is_up, reason


def engines_up(directory: Directory) -> dict[str, float]:
    """Return 1 for each engine that can be asked, 0 for the others, by its name in the cluster."""
    stalled = directory.stalled_workers
    return {name: float(offer.up and name not in stalled) for name, offer in directory.offers_by_name().items()}


def _missing(directory: Directory, models: Sequence[str], is_up: IsUp, reason: DownReason) -> str | None:
    """Return the first engine that a model lacks, and why, as a sentence; None if no model lacks any."""
    for model in models:
        offers = _by_name(directory, model, lambda leg: leg is not Leg.ENCODE)
        up = {name: offer for name, offer in offers.items() if is_up(name, offer)}
        if not serve_text({offer.leg for offer in up.values()}):
            return _first_missing(offers, is_up, reason) or f"model {model} has no engine"
        alone = _unpaired({name: offer for name, offer in up.items() if offer.leg.generates})
        if alone and not serve_text({offer.leg for name, offer in up.items() if name not in alone}):
            name, why = next(iter(alone.items()))
            return f"engine {name} {why}"
    return None


def unpaired(directory: Directory) -> dict[str, str]:
    """Return why prefills and decodes that are up can meet no other leg, by their names, as ends of sentences."""
    is_up, _ = _now(directory)
    reasons = dict[str, str]()
    for model in dict.fromkeys(worker.model for worker in directory.all_workers()):
        offers = _by_name(directory, model, lambda leg: leg.generates)
        reasons |= _unpaired({name: offer for name, offer in offers.items() if is_up(name, offer)})
    return reasons


def _unpaired(offers: Mapping[str, Offer]) -> Mapping[str, str]:
    infos = ((name, offer, offer.engine) for name, offer in offers.items())
    return Pairing.of((name, offer.leg, info.terms) for name, offer, info in infos if info is not None).unpaired


def _by_name(directory: Directory, model: str, is_wanted: Callable[[Leg], bool]) -> dict[str, Offer]:
    """Return the offers of a model's workers of some legs, by their names in the cluster."""
    return {name: offer for name, offer in directory.offers_by_name(model).items() if is_wanted(offer.leg)}


def _first_missing(offers: Mapping[str, Offer], is_up: IsUp, reason: DownReason) -> str | None:
    """Return the first of some workers that is not up, and why, as a sentence; None if all are."""
    missing = next((name for name, offer in offers.items() if not is_up(name, offer)), None)
    if missing is None:
        return None
    names = [offer.name for offer in offers.values()]
    name = offers[missing].name
    return f"engine {name if names.count(name) == 1 else missing} {reason(missing)}"
