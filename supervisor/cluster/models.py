"""Models: what clients may know and ask of each model, from the `EngineInfo` of its engines anywhere in the cluster.

Any engine of a model may get any of its requests, so the smallest one sets the limits, also while it is down: the
limits of clients must not depend on the available engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from actors.text.limits import PromptLimits
from protocol.dialects.http import Model
from protocol.messages.adapters import Adapter
from protocol.messages.cluster import EjectionState, Leg, Offer
from protocol.messages.engine import EngineInfo
from supervisor.cluster.directory import Directory
from supervisor.config.schema import Cluster

PAGE_SIZES_MAX = 4  # different ones of one model's engines, for which prompts are hashed


def smallest_engine(offers: Sequence[Offer]) -> EngineInfo | None:
    """Return the engine that takes the fewest tokens of one request, None if none has ever been ready.

    Encoders are none: they get items, not prompts.
    """
    engines = [offer.engine for offer in offers if offer.engine is not None and offer.leg is not Leg.ENCODE]
    return min(engines, key=lambda engine: engine.request_tokens_max, default=None)


def _smallest(directory: Directory, model: str) -> EngineInfo | None:
    return directory.derived(("smallest", model), lambda: smallest_engine(directory.offers(model)))  # cached there


def request_limits(
    directory: Directory, model: str, prompt_tokens_max: int, *, by_blocks: bool = False
) -> PromptLimits | None:
    """Return the limits of one request, None while no engine has ever been ready.

    `by_blocks` tells that a router looks for the blocks of prompts.
    """
    if (engine := _smallest(directory, model)) is None:
        return None
    tokens_max = engine.request_tokens_max
    page_sizes = directory.derived(("page sizes", model), lambda: _page_sizes(directory, model)) if by_blocks else ()
    return PromptLimits(engine, tokens_max, min(prompt_tokens_max, tokens_max), page_sizes)


def _page_sizes(directory: Directory, model: str) -> tuple[int, ...]:
    """Return the page sizes of a model's engines; an engine of another node may say anything of its own."""
    engines = [offer.engine for offer in directory.offers(model) if offer.leg.generates]
    sizes = {engine.page_size for engine in engines if engine is not None and engine.page_size > 0}
    return tuple(sorted(sizes)[:PAGE_SIZES_MAX])


def request_tokens_max(directory: Directory, model: str) -> int:
    """Return the most tokens of one request, prompt and answer together; 0 while no engine has ever been ready."""
    engine = _smallest(directory, model)
    return 0 if engine is None else engine.request_tokens_max


def adapters(directory: Directory, model: str) -> Mapping[str, Adapter]:
    """Return the loaded adapters of a model by name.

    If engines have different files under one name, those of most engines count, and requests go to no others.
    """
    return directory.derived(("adapters", model), lambda: _adapters(directory, model))


def _adapters(directory: Directory, model: str) -> dict[str, Adapter]:
    engines = (offer.engine for offer in directory.offers(model) if offer.engine is not None)
    counts = Counter(adapter for engine in engines for adapter in engine.adapters)
    rising = sorted(counts, key=lambda adapter: (adapter.name, counts[adapter], adapter.digest))
    return {adapter.name: adapter for adapter in rising}


def model_object(name: str, directory: Directory, created: int) -> Model:
    """Return a model as `GET /v1/models` shows it; `created` is in seconds since 1970."""
    engine = _smallest(directory, name)
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=request_tokens_max(directory, name),
        honours_seed=engine is not None and engine.honours_seed,
    )


def server_info(
    cluster: Cluster, directory: Directory, version: str, ejected: Callable[[], tuple[EjectionState, ...]] = tuple
) -> dict[str, object]:
    """Return the body of `GET /server_info` without `limits`, which the route adds.

    SGLang's clients read the keys up to `internal_states`. They expect one model, for which the first of the file
    stands, and at least one entry of `internal_states`.
    """
    models = list(cluster.model)
    offers = directory.offers_by_name()
    engines = {name: offer.engine for name, offer in offers.items() if offer.engine is not None}
    return {
        "version": version,
        "model_path": models[0],
        "tokenizer_path": models[0],
        "served_model_name": models[0],
        "max_total_num_tokens": sum(engine.kv_tokens_max for engine in engines.values()),
        "internal_states": [{}],
        "models": models,
        "engines": {
            name: {**_shown(engine), "weights": msgspec.to_builtins(offers[name].weights)}
            for name, engine in engines.items()
        },
        "ejected": msgspec.to_builtins(ejected()),
    }


def _shown(engine: EngineInfo) -> dict[str, object]:
    """Return the properties of an engine without its `hand_off_address`, whose bytes only its kind can read."""
    properties: dict[str, object] = msgspec.to_builtins(engine)
    del properties["hand_off_address"]
    return properties
