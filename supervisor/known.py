"""What a node knows of its engines, whether they are up or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import trio

from actors._text.prompts import Limits
from actors.engines.port import Engine
from protocol.dialects.http import Model
from protocol.errors import NotReady, Overloaded, RequestError
from protocol.messages import EngineInfo, EngineLoad
from supervisor.config import Cluster
from supervisor.metrics import Metrics
from supervisor.plug import Plug

LOADS_WITHIN_S = 1.0
FLUSHED_WITHIN_S = 5.0

Engines = Mapping[str, Plug[Engine]]


def never_ready(engines: Engines) -> str | None:
    """Say which engine has not been ready yet: from then on, one that is being restarted is worth waiting for."""
    missing = [name for name, plug in engines.items() if plug.last is None]
    return f"engine {missing[0]} is still starting" if missing else None


def unready(engines: Engines) -> str | None:
    """Say which engine cannot be asked at the moment."""
    missing = [name for name, plug in engines.items() if plug.now is None]
    return f"engine {missing[0]} is starting" if missing else None


def up(engines: Engines) -> dict[str, float]:
    """Return 1 for each engine that can be asked, 0 for the others."""
    return {name: float(plug.now is not None) for name, plug in engines.items()}


def info(plugs: Sequence[Plug[Engine]]) -> EngineInfo | None:
    """Return what is known of the engine that holds least, since any of them may get a request."""
    known = [plug.last.info for plug in plugs if plug.last is not None]
    return min(known, key=lambda each: each.request_tokens_max, default=None)


def limits(plugs: Sequence[Plug[Engine]], prompt_max: int) -> Limits | None:
    """Return what one request may have, None while no engine has ever been ready."""
    least = info(plugs)
    return None if least is None else Limits(least, least.request_tokens_max, min(prompt_max, least.request_tokens_max))


def longest(plugs: Sequence[Plug[Engine]]) -> int:
    """Return the most tokens of one request, 0 while no engine has ever been ready."""
    least = info(plugs)
    return 0 if least is None else least.request_tokens_max


def model(name: str, plugs: Sequence[Plug[Engine]], created: int) -> Model:
    """Return what clients are told of a model."""
    least = info(plugs)
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=longest(plugs),
        honours_seed=least is not None and least.honours_seed,
    )


async def metrics_text(engines: Engines, metrics: Metrics) -> bytes:
    """Return the metrics with each engine's own count as it is now; one that does not answer in time is left out."""
    loads: dict[str, EngineLoad] = {}

    async def ask(name: str, asked: Engine) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            loads[name] = await asked.load()

    async with trio.open_nursery() as nursery:
        for name, asked in _now(engines):
            nursery.start_soon(ask, name, asked)
    return metrics.text(loads)


async def flush_caches(engines: Engines) -> None:
    """Make every engine forget its prefix cache; raises `Overloaded` if one is busy, `NotReady` if one is down."""
    if (why := unready(engines)) is not None:
        raise NotReady(why)
    for name, asked in _now(engines):
        with trio.move_on_after(FLUSHED_WITHIN_S) as patience:
            try:
                await asked.flush_cache()
            except Overloaded as error:
                raise Overloaded(f"engine {name} is busy: {error.detail}") from error
        if patience.cancelled_caught:
            raise Overloaded(f"engine {name} did not answer within {FLUSHED_WITHIN_S} s")


def server_info(cluster: Cluster, engines: Engines, version: str) -> dict[str, object]:
    """Return what `GET /server_info` tells; the first names are those that SGLang's own clients look for."""
    models = list(cluster.model)
    known = {name: plug.last.info for name, plug in engines.items() if plug.last is not None}
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
