"""Operations of engines: the service of each on its node, and the question to every engine of the cluster.

The row of an operation (`protocol.messages.operations`) has everything about it, and the functions here name two only:
an encoder's embeddings are flushed by their node, and a new role may leave a model without answers. All engines are
asked concurrently, each with its own timeout, so an engine in trouble delays no other, and each has an outcome of its
own. Some operations come in rounds (`rounds.py`).

If the row demands it, an engine is out of service until it has answered: routers choose others, new requests wait. Such
an operation is a task of the engine's tree, not of the asker (`engine_life.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

import trio

from actors.engines.embedding.port import Embedder
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.port import Encoder
from actors.engines.port import Engine
from actors.kit.calls import Answer, Call, Function
from protocol.dialects.operations import Outcomes
from protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    NotFound,
    NotReady,
    RequestError,
    Unsupported,
)
from protocol.messages.engine import Done, GetLoad
from protocol.messages.kind import Message
from protocol.messages.operation import EngineOperation, OperationScope
from protocol.messages.operations import OPERATION_OF, OPERATIONS, FlushCache, is_for
from protocol.messages.role import SetRole, left_unserved
from protocol.messages.weights import numbered
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_life import EngineLife
from supervisor.cluster.model_weights import errors_of_others
from supervisor.cluster.rounds import RequestOfEach, in_rounds
from supervisor.links.serving import Services
from supervisor.supervision.registration import Registration

ENGINES_A_TURN = 50  # that are asked before other tasks may run

E = TypeVar("E", Engine, Encoder, Embedder)
T = TypeVar("T")
Engines: TypeAlias = Mapping[str, Registration[Engine] | Registration[Encoder] | Registration[Embedder]]

Take: TypeAlias = Callable[[str, Message | RequestError | None], None]
"""A function that takes the answer or the error of an engine, by its name in the cluster."""


# The cluster --------------------------------------------------------------------------


async def operate(directory: Directory, request: Message, engine: str | None = None) -> Outcomes:
    """Have the engines of an operation's scope carry it out, or `engine` alone; return the outcome of each.

    An engine is named alone or behind its node, as in `main/tiny`. Raises `NotFound` for an unknown name, and
    `BadRequest` for an ambiguous name or a missing one.
    """
    operation = OPERATION_OF[type(request)]
    engines = _chosen(directory, request, engine)
    models = {name: worker.model for name, worker in engines.items()}
    served = Counter(worker.model for worker in directory.engines().values() if worker.leg.generates)

    def of_engine(model: str) -> Message:
        newest = directory.newest_weights(model).record
        return numbered(request, newest, alone=engine is not None and served[model] > 1)

    requests = {name: of_engine(model) for name, model in models.items()}
    outcomes = await in_rounds(operation, requests, partial(_ask_each, directory, engines))
    return dict(sorted({**outcomes, **errors_of_others(requests, models, outcomes)}.items()))


async def _ask_each(
    directory: Directory, engines: Mapping[str, ClusterWorker], requests: RequestOfEach
) -> dict[str, Message | RequestError]:
    """Ask engines concurrently, each with a timeout of its own, and return the outcome of each."""
    outcomes = dict[str, Message | RequestError]()

    async def ask(name: str, request: Message) -> None:
        operation = OPERATION_OF[type(request)]
        error = _refusal(operation, engines[name]) or _unserved(directory, name, engines[name], request)
        if error is not None:
            outcomes[name] = error
            return

        def take(name: str, answer: Message | RequestError | None) -> None:
            if isinstance(answer, operation.result | RequestError):
                outcomes[name] = answer
            else:
                outcomes[name] = InternalError("it answered with something else")

        await _call(name, engines[name], request, operation.answered_within_s(request), take)

    await _each(requests, ask)
    return outcomes


def _chosen(directory: Directory, request: Message, engine: str | None) -> dict[str, ClusterWorker]:
    """Return the engines that are asked, by their names in the cluster."""
    operation = OPERATION_OF[type(request)]
    engines = {name: worker for name, worker in directory.engines().items() if is_for(operation, worker.leg)}
    if operation.scope is OperationScope.MODEL:
        engines = _of_model(engines, request)
    if engine is None:
        if operation.scope is OperationScope.ONE:
            raise BadRequest(f"{operation.name} is for one engine: name it", param="engine")
        return engines
    named = {name: worker for name, worker in engines.items() if engine in {name, worker.engine_name}}
    if not named:
        raise NotFound(f"there is no engine {engine!r} that {operation.name} is for", param="engine")
    if len(named) > 1:
        raise BadRequest(f"several engines are named {engine!r}: {', '.join(sorted(named))}", param="engine")
    return named


def _of_model(engines: Mapping[str, ClusterWorker], request: Message) -> dict[str, ClusterWorker]:
    """Return the engines of the model that a request names, or of the only one."""
    name, models = getattr(request, "model", None) or "", sorted({worker.model for worker in engines.values()})
    if not name and len(models) > 1:
        raise BadRequest(f"several models are served here: {', '.join(models)}; name one", param="model")
    if name and name not in models:
        raise NotFound(f"there is no engine of a model {name!r:.128}; there is {', '.join(models)}", param="model")
    return {engine: worker for engine, worker in engines.items() if name in {"", worker.model}}


def _refusal(operation: EngineOperation, worker: ClusterWorker) -> RequestError | None:
    """Return why an engine is not asked: a node of an older version ends the link on an unknown message."""
    if operation.every_version:
        return None
    if (info := worker.info) is None:
        return NotReady("it is starting")
    if operation.name not in info.operations:
        return Unsupported(operation.unlisted)
    return None


def _unserved(directory: Directory, name: str, worker: ClusterWorker, request: Message) -> RequestError | None:
    """Return the refusal of a role that would leave a model without answers; only a router knows every engine."""
    if not isinstance(request, SetRole) or not directory.routes:
        return None
    legs = {f"{other.node}/{other.engine_name}": other.leg for other in directory.workers(worker.model)}
    why = left_unserved(legs, name, request.role)
    return None if why is None else BadRequest(why, param="role")


async def call_each(engines: Mapping[str, ClusterWorker], request: Message, within_s: float, take: Take) -> None:
    """Ask engines concurrently, each with a timeout of its own, and give each answer to `take` as soon as it is there.

    One that does not answer in time has failed with `DeadlineExceeded`.
    """

    async def ask(name: str, worker: ClusterWorker) -> None:
        await _call(name, worker, request, within_s, take)

    await _each(engines, ask)


async def _each(asked: Mapping[str, T], ask: Callable[[str, T], Awaitable[None]]) -> None:
    """Call `ask` for all, concurrently."""
    async with trio.open_nursery() as nursery:
        for number, (name, value) in enumerate(asked.items(), start=1):
            nursery.start_soon(ask, name, value)
            if not number % ENGINES_A_TURN:
                await trio.lowlevel.checkpoint()


async def _call(name: str, worker: ClusterWorker, request: Message, within_s: float, take: Take) -> None:
    """Ask one engine, and give its answer to `take`."""
    answer: Message | RequestError | None
    try:
        with trio.fail_after(within_s):
            answer = await worker.call(request)
    except trio.TooSlowError:
        answer = DeadlineExceeded(f"it did not answer within {within_s:g} s")
    except RequestError as error:
        answer = error
    take(name, answer)


# One node -----------------------------------------------------------------------------


def engine_services(name: str, engine: Registration[Engine], life: Registration[EngineLife]) -> Services:
    """Return the services of an engine of this node for other nodes: its load and its operations.

    `life` is its present life, in which the operations that take it out of service are carried out.
    """
    return {
        (name, GetLoad): Function(partial(_load, engine)),
        **{
            (name, operation.request): Function(
                partial(operate_in_tree, operation, life)
                if operation.leaves_service or operation.changes_info
                else partial(_operate, operation, engine, life)
            )
            for operation in OPERATIONS
        },
    }


def encoder_services(name: str, encoder: Registration[Encoder], embeddings: EmbeddingCache) -> Services:
    """Return the services of an encoder of this node for other nodes: its load, and the flush of its `embeddings`.

    The embeddings outlive the encoder, so their flush asks no engine.
    """
    return {
        (name, GetLoad): Function(partial(_load, encoder)),
        (name, FlushCache): Function(partial(_drop, embeddings)),
    }


def embedder_services(name: str, embedder: Registration[Embedder]) -> Services:
    """Return the services of an embedder of this node for other nodes: its load."""
    return {(name, GetLoad): Function(partial(_load, embedder))}


async def _load(engine: Registration[E], _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    return await _up(engine.live).load()


async def _operate(
    operation: EngineOperation, engine: Registration[Engine], life: Registration[EngineLife], request: Message
) -> Message:
    await trio.lowlevel.checkpoint()
    live = _up(engine.live)
    if life.live is not None:
        life.live.state.check(operation, request)
    return await live.operate(request)


async def operate_in_tree(operation: EngineOperation, life: Registration[EngineLife], request: Message) -> Message:
    """Have an operation carried out by a task of the engine's tree, which outlives a cancelled asker."""
    await trio.lowlevel.checkpoint()
    call: Call[Message, Message, Message] = Call(request, Answer(0))
    of_life = _up(life.live)
    carry_out = of_life.carry_out if operation.leaves_service else of_life.carry_out_in_service
    of_life.tasks.start_soon(carry_out, operation, call)
    result = await call.answer.result()
    assert result is not None  # an operation has a result
    return result


async def _drop(cache: EmbeddingCache, _: Message) -> Message:
    await trio.lowlevel.checkpoint()
    cache.clear()
    return Done()


def _up(part: T | None) -> T:
    """Return a part of an engine; raises `NotReady` if there is none."""
    if part is None:
        raise NotReady("it is starting")
    return part
