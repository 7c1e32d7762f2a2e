"""What a node knows of the cluster's engines, whether they are up or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import trio

from actors._text.prompts import Limits
from actors.engines.port import Engine
from protocol.cluster import Leg, Offer
from protocol.dialects.http import Model
from protocol.errors import NotReady, Overloaded, RequestError
from protocol.messages import EngineInfo, EngineLoad
from supervisor.config import Cluster
from supervisor.directory import Directory
from supervisor.metrics import Metrics
from supervisor.plug import Plug

LOADS_WITHIN_S = 1.0
FLUSHED_WITHIN_S = 5.0

Engines = Mapping[str, Plug[Engine]]


def never_ready(directory: Directory, models: Sequence[str]) -> str | None:
    """Say what has not been ready yet: from then on, an engine that is being restarted is worth waiting for."""
    return _missing(directory, models, lambda offer: offer.engine is not None, lambda _: "still starting")


def unready(directory: Directory, models: Sequence[str]) -> str | None:
    """Say which model cannot be served at the moment for want of which engine."""
    leaving = directory.leaving

    def there(offer: Offer) -> bool:
        return offer.up and offer.name not in leaving

    def how(offer: Offer) -> str:
        return "on a node that drains" if offer.name in leaving else "starting"

    return _missing(directory, models, there, how)


def _missing(
    directory: Directory, models: Sequence[str], there: Callable[[Offer], bool], how: Callable[[Offer], str]
) -> str | None:
    for model in models:
        offers = directory.offers(model)
        legs = {offer.leg for offer in offers if there(offer)}
        if Leg.BOTH not in legs and not {Leg.PREFILL, Leg.DECODE} <= legs:
            missing = next((offer for offer in offers if not there(offer)), None)
            return f"model {model} has no engine" if missing is None else f"engine {missing.name} is {how(missing)}"
    return None


def up(directory: Directory) -> dict[str, float]:
    """Return 1 for each engine that can be asked, 0 for the others."""
    return {offer.name: float(offer.up) for offer in directory.offers()}


def info(offers: Sequence[Offer]) -> EngineInfo | None:
    """Return what is known of the engine that holds least, since any of them may get a request."""
    known = [offer.engine for offer in offers if offer.engine is not None]
    return min(known, key=lambda each: each.request_tokens_max, default=None)


def limits(directory: Directory, model: str, prompt_max: int) -> Limits | None:
    """Return what one request may have, None while no engine has ever been ready."""
    least = info(directory.offers(model))
    return None if least is None else Limits(least, least.request_tokens_max, min(prompt_max, least.request_tokens_max))


def longest(directory: Directory, model: str) -> int:
    """Return the most tokens of one request, 0 while no engine has ever been ready."""
    least = info(directory.offers(model))
    return 0 if least is None else least.request_tokens_max


def model(name: str, directory: Directory, created: int) -> Model:
    """Return what clients are told of a model."""
    least = info(directory.offers(name))
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=longest(directory, name),
        honours_seed=least is not None and least.honours_seed,
    )


async def loads(engines: Engines) -> dict[str, EngineLoad]:
    """Return each engine's own count as it is now; one that does not answer in time is left out."""
    counted: dict[str, EngineLoad] = {}

    async def ask(name: str, asked: Engine) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            counted[name] = await asked.load()

    async with trio.open_nursery() as nursery:
        for name, asked in _now(engines):
            nursery.start_soon(ask, name, asked)
    return counted


async def metrics_text(engines: Engines, metrics: Metrics) -> bytes:
    """Return the metrics with each engine's own count as it is now; one that does not answer in time is left out."""
    return metrics.text(await loads(engines))


async def flush_caches(engines: Engines) -> None:
    """Make every engine of this node forget its prefix cache; raises `Overloaded` for a busy one, else `NotReady`."""
    missing = [name for name, plug in engines.items() if plug.now is None]
    if missing:
        raise NotReady(f"engine {missing[0]} is starting")
    for name, asked in _now(engines):
        with trio.move_on_after(FLUSHED_WITHIN_S) as patience:
            try:
                await asked.flush_cache()
            except Overloaded as error:
                raise Overloaded(f"engine {name} is busy: {error.detail}") from error
        if patience.cancelled_caught:
            raise Overloaded(f"engine {name} did not answer within {FLUSHED_WITHIN_S} s")


def server_info(cluster: Cluster, directory: Directory, version: str) -> dict[str, object]:
    """Return what `GET /server_info` tells; the first names are those that SGLang's own clients look for."""
    models = list(cluster.model)
    known = {offer.name: offer.engine for offer in directory.offers() if offer.engine is not None}
    return {
        "version": version,
        "model_path": models[0],
        "tokenizer_path": models[0],
        "served_model_name": models[0],
        "max_total_num_tokens": sum(each.kv_tokens_max for each in known.values()),
        "internal_states": [{}],
        "models": models,
        "engines": {name: msgspec.to_builtins(each) for name, each in known.items()},
        "limits": msgspec.to_builtins(cluster.gateway.limits),
    }


def _now(engines: Engines) -> Iterator[tuple[str, Engine]]:
    for name, plug in engines.items():
        if plug.now is not None:
            yield name, plug.now
