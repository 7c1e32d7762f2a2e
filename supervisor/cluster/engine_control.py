"""What a node knows of the cluster's engines, whether they are up or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import trio

from actors.engines.port import Engine
from actors.kit.calls import Function
from actors.text.prompts import PromptLimits
from protocol.cluster import COUNT_MAX, EjectionState, Leg, Offer
from protocol.dialects.http import Model
from protocol.errors import DeadlineExceeded, LinkLost, NotReady, Overloaded, RequestError
from protocol.kind import Message
from protocol.messages import Done, EngineInfo, EngineLoad, FlushCache, GetLoad
from supervisor.cluster.directory import Directory
from supervisor.cluster.workers import LocalWorker, RemoteWorker
from supervisor.config.load import Cluster
from supervisor.links.serving import Services
from supervisor.supervision.registration import Registration
from supervisor.telemetry.metrics import Metrics

LOADS_WITHIN_S = 1.0
ASKED_A_TURN = 50  # of the engines of a large cluster
FLUSHED_WITHIN_S = 5.0

Engines = Mapping[str, Registration[Engine]]


def never_ready(directory: Directory, models: Sequence[str]) -> str | None:
    """Say what has not been ready yet: from then on, an engine that is being restarted is worth waiting for."""

    def how(name: str) -> str:
        return directory.models.rejections.get(name, "is still starting")

    def missing() -> str | None:
        return _missing(directory, models, lambda _, offer: offer.engine is not None, how)

    return directory.derived("never ready", missing)


def unready(directory: Directory, models: Sequence[str]) -> str | None:
    """Say which model cannot be served at the moment for want of which engine, or who takes this node for a twin."""
    if (twin := directory.twin) is not None:
        return twin
    leaving, stalled = directory.leaving, directory.stalled
    here = {f"{directory.name}/{name}": each.plug.status_text for name, each in directory.here.items()}
    told = {name: offer.why for name, offer in directory.named().items() if offer.why}
    unlinked = {node: state for node, (state, link, _) in directory.nodes.items() if link is None}
    nodes = {f"{node}/{each.name}": node for node, state in unlinked.items() for each in state.offers}

    def there(name: str, offer: Offer) -> bool:
        return offer.up and name not in leaving and name not in stalled

    def how(name: str) -> str:
        if name in stalled:
            return "is on a node that stands still"
        if name in leaving:
            return "is on a node that drains"
        away = f"is on node {nodes[name]}, to which there is no link" if name in nodes else None
        return here.get(name) or told.get(name) or away or "is starting"

    return _missing(directory, models, there, how)


def _missing(
    directory: Directory, models: Sequence[str], there: Callable[[str, Offer], bool], how: Callable[[str], str]
) -> str | None:
    for model in models:
        offers = directory.named(model)
        legs = {offer.leg for name, offer in offers.items() if there(name, offer)}
        if Leg.BOTH not in legs and not {Leg.PREFILL, Leg.DECODE} <= legs:
            missing = next((name for name, offer in offers.items() if not there(name, offer)), None)
            if missing is None:
                return f"model {model} has no engine"
            own = [offer.name for offer in offers.values()]
            short = offers[missing].name
            return f"engine {short if own.count(short) == 1 else missing} {how(missing)}"
    return None


def engines_up(directory: Directory) -> dict[str, float]:
    """Return 1 for each engine that can be asked, 0 for the others, by its name in the cluster."""
    stalled = directory.stalled
    return {name: float(offer.up and name not in stalled) for name, offer in directory.named().items()}


def smallest_engine(offers: Sequence[Offer]) -> EngineInfo | None:
    """Return what is known of the engine that holds least, since any of them may get a request."""
    known = [offer.engine for offer in offers if offer.engine is not None]
    return min(known, key=lambda each: each.request_tokens_max, default=None)


def _least(directory: Directory, model: str) -> EngineInfo | None:
    return directory.derived(("least", model), lambda: smallest_engine(directory.offers(model)))


def request_limits(directory: Directory, model: str, prompt_max: int) -> PromptLimits | None:
    """Return what one request may have, None while no engine has ever been ready."""
    least = _least(directory, model)
    return (
        None
        if least is None
        else PromptLimits(least, least.request_tokens_max, min(prompt_max, least.request_tokens_max))
    )


def request_tokens_max(directory: Directory, model: str) -> int:
    """Return the most tokens of one request, 0 while no engine has ever been ready."""
    least = _least(directory, model)
    return 0 if least is None else least.request_tokens_max


def model_object(name: str, directory: Directory, created: int) -> Model:
    """Return what clients are told of a model."""
    least = _least(directory, name)
    return Model(
        id=name,
        created=created,
        root=name,
        max_model_len=request_tokens_max(directory, name),
        honours_seed=least is not None and least.honours_seed,
    )


async def local_loads(engines: Engines) -> dict[str, EngineLoad]:
    """Return each engine's own count as it is now; one that does not answer in time is left out."""
    counted: dict[str, EngineLoad] = {}

    async def ask(name: str, asked: Engine) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            counted[name] = await asked.load()

    async with trio.open_nursery() as nursery:
        for name, asked in _now(engines):
            nursery.start_soon(ask, name, asked)
    return counted


async def local_metrics_text(engines: Engines, metrics: Metrics) -> bytes:
    """Return the metrics with each engine's own count as it is now; one that does not answer in time is left out."""
    return await metrics.render_in_steps(await local_loads(engines))


# Wherever they are ----------------------------------------------------------------------


def engine_services(engines: Engines) -> Services:
    """Return what other nodes ask of each engine of this one: how busy it is, and to forget its prefix cache."""
    asked: tuple[type[Message], ...] = (GetLoad, FlushCache)
    return {(name, kind): Function(partial(_answer, plug)) for name, plug in engines.items() for kind in asked}


async def cluster_loads(directory: Directory) -> dict[str, EngineLoad]:
    """Return the own count of each engine of the cluster as it is now, by its name there.

    One that does not answer in time is left out, and one that says what cannot be.
    """
    said = await _ask_all(directory, GetLoad(), LOADS_WITHIN_S)
    return {name: load for name, load in sorted(said.items()) if isinstance(load, EngineLoad) and _possible(load)}


async def cluster_metrics_text(directory: Directory, metrics: Metrics) -> bytes:
    """Return the metrics with what `cluster_loads` returns, and without the calls of nodes that have been forgotten."""
    metrics.retain_nodes({directory.name, *directory.nodes})
    return await metrics.render_in_steps(await cluster_loads(directory))


async def flush_caches(directory: Directory) -> None:
    """Make every engine of the cluster forget its prefix cache.

    Raises `Overloaded` if one is busy or does not answer in time, else `NotReady` if one cannot be asked; the sentence
    says of each engine whether it was flushed.
    """
    said = await _ask_all(directory, FlushCache(), FLUSHED_WITHIN_S)
    failed = {name: each for name, each in said.items() if not isinstance(each, Done)}
    if failed:
        flushed = sorted(said.keys() - failed.keys())
        why = [f"engine {name} was not flushed: {_why(each)}" for name, each in sorted(failed.items())]
        told = "; ".join(why + [f"flushed: {', '.join(flushed)}"] * bool(flushed))
        busy = any(isinstance(each, Overloaded | DeadlineExceeded) for each in failed.values())
        raise Overloaded(told) if busy else NotReady(told)


async def _ask_all(
    directory: Directory, request: GetLoad | FlushCache, within_s: float
) -> dict[str, Message | RequestError | None]:
    """Ask all engines at once, and return by its name what each has answered or failed with."""
    said: dict[str, Message | RequestError | None] = {}

    async def ask(each: LocalWorker | RemoteWorker) -> None:
        name = each.load.name
        try:
            with trio.fail_after(within_s):
                said[name] = await _ask(each, request)
        except trio.TooSlowError:
            said[name] = DeadlineExceeded(f"it did not answer within {within_s:g} s")
        except RequestError as error:
            said[name] = error

    async with trio.open_nursery() as nursery:
        for number, each in enumerate(tuple(directory.every()), start=1):
            nursery.start_soon(ask, each)
            if not number % ASKED_A_TURN:
                await trio.lowlevel.checkpoint()
    return said


async def _ask(each: LocalWorker | RemoteWorker, request: GetLoad | FlushCache) -> Message | None:
    if isinstance(each, LocalWorker):
        return await _answer(each.plug, request)
    if each.link is None:
        raise LinkLost(f"there is no link to node {each.node}")
    async with each.link.ask(request, 0, each.offer.name) as answer:
        return await answer.result()


async def _answer(plug: Registration[Engine], request: Message) -> Message:
    await trio.lowlevel.checkpoint()
    if plug.current is None:
        raise NotReady("it is starting")
    if isinstance(request, GetLoad):
        return await plug.current.load()
    await plug.current.flush_cache()
    return Done()


def _possible(load: EngineLoad) -> bool:
    counts = (load.running, load.waiting, load.kv_tokens_used)
    return min(counts) >= 0 and max(counts) <= COUNT_MAX


def _why(said: Message | RequestError | None) -> str:
    return said.detail if isinstance(said, RequestError) else "it answered with something else"


def server_info(
    cluster: Cluster, directory: Directory, version: str, aside: Callable[[], tuple[EjectionState, ...]] = tuple
) -> dict[str, object]:
    """Return what `GET /server_info` tells beside limits; the first names are those that SGLang's clients look for."""
    models = list(cluster.model)
    known = {name: offer.engine for name, offer in directory.named().items() if offer.engine is not None}
    return {
        "version": version,
        "model_path": models[0],
        "tokenizer_path": models[0],
        "served_model_name": models[0],
        "max_total_num_tokens": sum(each.kv_tokens_max for each in known.values()),
        "internal_states": [{}],
        "models": models,
        "engines": {name: msgspec.to_builtins(each) for name, each in known.items()},
        "set_aside": msgspec.to_builtins(aside()),
    }


def _now(engines: Engines) -> Iterator[tuple[str, Engine]]:
    for name, plug in engines.items():
        if plug.current is not None:
            yield name, plug.current
