"""Engines' own metrics, collected from the engines of a node or of the cluster that have some.

Engines are asked concurrently and each for a limited time, so one that is stuck is left out and holds up no scrape. All
texts together have a limit in memory; an engine that finds no room is counted, and says so by its series left out.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import trio
from attrs import Factory, define

from actors.engines.port import Engine
from protocol.errors import RequestError
from protocol.messages.kind import Message
from protocol.messages.operations import METRICS_BYTES_MAX, OPERATION_OF, EngineMetrics, GetMetrics
from supervisor.cluster.cluster_worker import ClusterWorker
from supervisor.cluster.directory import Directory
from supervisor.cluster.operations import ENGINES_A_TURN, Engines, call_each

METRICS_WITHIN_S = OPERATION_OF[GetMetrics].within_s
TEXTS_BYTES_MAX = 16 * 1024 * 1024  # of all engines together, as they are kept while they are merged

ByEngine: TypeAlias = dict[str, EngineMetrics]
"""Metrics of engines by their names in the cluster."""


@define(eq=False)
class _Texts:
    """The metrics of the engines with an answer, within a limit of `room`."""

    room: int
    kept: ByEngine = Factory(dict)

    def add(self, name: str, answer: Message | RequestError | None) -> None:
        """Keep the answer of an engine, if it is metrics; without room for it, only its number of lines."""
        if not isinstance(answer, EngineMetrics):
            return
        size = len(answer.text)  # characters, and so at most a quarter of its bytes less
        if size > min(self.room, METRICS_BYTES_MAX):
            answer = EngineMetrics("", answer.left_out + answer.text.count("\n"))
            size = 0
        self.room -= size
        self.kept[name] = answer


async def local_metrics(engines: Engines, bytes_max: int = TEXTS_BYTES_MAX) -> ByEngine:
    """Return the metrics of each engine of this node that has some, by its name; those not in time are left out."""
    texts = _Texts(bytes_max)

    async def ask(name: str, engine: Engine) -> None:
        with trio.move_on_after(METRICS_WITHIN_S):
            try:
                texts.add(name, await engine.operate(GetMetrics()))
            except RequestError as error:
                texts.add(name, error)

    async with trio.open_nursery() as nursery:
        for name, registration in engines.items():
            engine = registration.live
            if engine is not None and engine.info.metrics:
                nursery.start_soon(ask, name, cast("Engine", engine))  # no encoder has metrics
    return texts.kept


async def cluster_metrics(directory: Directory, bytes_max: int = TEXTS_BYTES_MAX) -> ByEngine:
    """Return the metrics of each engine of the cluster that has some; late answers are left out."""
    texts = _Texts(bytes_max)
    engines: dict[str, ClusterWorker] = {}
    for number, (name, worker) in enumerate(directory.engines().items(), start=1):
        if (info := worker.info) is not None and info.metrics:
            engines[name] = worker
        if not number % ENGINES_A_TURN:
            await trio.lowlevel.checkpoint()
    await call_each(engines, GetMetrics(), METRICS_WITHIN_S, texts.add)
    return texts.kept
