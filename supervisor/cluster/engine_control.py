"""Engine control: the load of every engine of the cluster, and the flush of every prefix cache, also of embeddings.

All engines are asked concurrently, each with its own timeout, so one that hangs does not delay the others. An answer of
another node may be wrong: impossible loads are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeAlias, TypeVar

import trio
from attrs import astuple

from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.kit.calls import Function
from protocol.errors import DeadlineExceeded, InternalError, NotReady, Overloaded, RequestError
from protocol.messages.cluster import COUNT_MAX, RANKS_MAX, rank_name
from protocol.messages.engine import Done, EngineLoad, FlushCache, GetLoad
from protocol.messages.kind import Message
from protocol.messages.operations import GetMetrics
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory
from supervisor.links.serving import Services
from supervisor.supervision.registration import Registration

LOADS_WITHIN_S = 1.0
FLUSHED_WITHIN_S = 5.0
ENGINES_A_TURN = 50  # that are asked before other tasks may run

E = TypeVar("E", bound=Engine | Encoder)
Engines: TypeAlias = Mapping[str, Registration[Engine] | Registration[Encoder]]


Take: TypeAlias = Callable[[str, Message | RequestError | None], None]
"""A function that takes the answer or the error of an engine, by its name in the cluster."""


async def call_each(engines: Mapping[str, ClusterWorker], request: Message, within_s: float, take: Take) -> None:
    """Ask engines concurrently, each with a timeout of its own, and give each answer to `take` as soon as it is there.

    One that does not answer in time has failed with `DeadlineExceeded`.
    """

    async def ask(name: str, worker: ClusterWorker) -> None:
        answer: Message | RequestError | None
        try:
            with trio.fail_after(within_s):
                answer = await worker.call(request)
        except trio.TooSlowError:
            answer = DeadlineExceeded(f"it did not answer within {within_s:g} s")
        except RequestError as error:
            answer = error
        take(name, answer)

    async with trio.open_nursery() as nursery:
        for number, (name, worker) in enumerate(engines.items(), start=1):
            nursery.start_soon(ask, name, worker)
            if not number % ENGINES_A_TURN:
                await trio.lowlevel.checkpoint()


async def local_loads(engines: Engines) -> dict[str, EngineLoad]:
    """Return the load of each worker of this node by its name; one that does not answer in time is left out."""
    loads: dict[str, EngineLoad] = {}

    async def ask(name: str, engine: Engine | Encoder) -> None:
        with trio.move_on_after(LOADS_WITHIN_S), suppress(RequestError):
            loads.update(_by_worker(name, await engine.load()))

    async with trio.open_nursery() as nursery:
        for name, registration in engines.items():
            if registration.live is not None:
                nursery.start_soon(ask, name, registration.live)
    return loads


async def cluster_loads(directory: Directory) -> dict[str, EngineLoad]:
    """Return the load of each worker of the cluster by its name there; one that does not answer in time is left out.

    So is the answer of an engine that tells of more ranks than it has.
    """
    answers = await _ask_all(directory, GetLoad(), LOADS_WITHIN_S)
    ranks = Counter(f"{worker.node}/{worker.engine_name}" for worker in directory.all_workers())
    return {
        worker: load
        for name, answer in sorted(answers.items())
        if isinstance(answer, EngineLoad) and len(answer.by_rank) <= ranks[name]
        for worker, load in _by_worker(name, answer)
        if _is_possible(load)
    }


async def flush_caches(directory: Directory) -> None:
    """Flush the prefix cache of every engine of the cluster.

    Raises `InternalError` if one fails, else `Overloaded` if one is busy or does not answer in time, else `NotReady`.
    The detail names the engines that were flushed and those that were not.
    """
    answers = await _ask_all(directory, FlushCache(), FLUSHED_WITHIN_S)
    failed = {name: answer for name, answer in answers.items() if not isinstance(answer, Done)}
    if not failed:
        return
    flushed = sorted(answers.keys() - failed.keys())
    sentences = [f"engine {name} was not flushed: {_detail(answer)}" for name, answer in sorted(failed.items())]
    detail = "; ".join(sentences + [f"flushed: {', '.join(flushed)}"] * bool(flushed))
    if any(isinstance(answer, InternalError) for answer in failed.values()):
        raise InternalError(detail)
    is_busy = any(isinstance(answer, Overloaded | DeadlineExceeded) for answer in failed.values())
    raise Overloaded(detail) if is_busy else NotReady(detail)


def engine_services(
    engines: Mapping[str, Registration[Engine]],
    encoders: Mapping[str, Registration[Encoder]],
    embeddings: Mapping[str, EmbeddingCache],
) -> Services:
    """Return the services of this node's engines for other nodes: their loads, their metrics, and the flush of caches.

    `embeddings` are those that each encoder has made.
    """
    both: Engines = {**engines, **encoders}
    return {
        **{(name, GetLoad): Function(partial(_load, engine)) for name, engine in both.items()},
        **{(name, GetMetrics): Function(partial(_metrics, engine)) for name, engine in engines.items()},
        **{(name, FlushCache): Function(partial(_flush, engine)) for name, engine in engines.items()},
        **{(name, FlushCache): Function(partial(_drop, cache)) for name, cache in embeddings.items()},
    }


async def _ask_all(
    directory: Directory, request: GetLoad | FlushCache, within_s: float
) -> dict[str, Message | RequestError | None]:
    """Ask all engines concurrently, and return the answer or the error of each, by its name in the cluster."""
    answers: dict[str, Message | RequestError | None] = {}
    await call_each(directory.engines(), request, within_s, answers.__setitem__)
    return answers


async def _load(engine: Registration[Engine] | Registration[Encoder], _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    return await _up(engine.live).load()


async def _metrics(engine: Registration[Engine], _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    return await _up(engine.live).metrics()


async def _flush(engine: Registration[Engine], _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    await _up(engine.live).flush_cache()
    return Done()


async def _drop(cache: EmbeddingCache, _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    cache.clear()
    return Done()


def _up(engine: E | None) -> E:
    """Return an engine; raises `NotReady` if there is none."""
    if engine is None:
        raise NotReady("it is starting")
    return engine


def _by_worker(engine: str, load: EngineLoad) -> Iterator[tuple[str, EngineLoad]]:
    """Yield the loads of an engine's workers by their names: that of the engine, or those of its ranks."""
    ranks = load.by_rank[:RANKS_MAX]
    if not ranks:
        yield engine, load
    for number, rank in enumerate(ranks):
        yield rank_name(engine, number, len(ranks)), EngineLoad(*astuple(rank))


def _is_possible(load: EngineLoad) -> bool:
    counts = (load.running, load.waiting, load.kv_tokens_used)
    return min(counts) >= 0 and max(counts) <= COUNT_MAX


def _detail(answer: Message | RequestError | None) -> str:
    return answer.detail if isinstance(answer, RequestError) else "it answered with something else"
