"""The embedder's host: one SGLang engine that computes vectors or scores, and answers its node over a link.

SGLang's tokenizer manager makes types of tokens from texts alone, keeps some twenty fields of each item, and wakes a
task for each. Here token ids go straight to the scheduler, a request as one message, and each step comes back as one
(`vectors.py`). A request that asks for an answer ends SGLang's scheduler, so none gets there. The host may decide
nothing about a request: deadlines, retries and admission are the node's. asyncio stays in this folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from attrs import evolve

from actors.engines import model_files
from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.failed_start import fail_start
from actors.engines.host.served_link import ServedLink
from actors.engines.host.watchdog import Watchdog
from actors.engines.host.watchers import Watchers
from actors.engines.sglang import boot_message
from actors.engines.sglang.boot_message import BootMessage
from actors.engines.sglang.embedding_model import EmbedderModel, read_model
from actors.engines.sglang.host import engine_process, outputs, poolers, translation
from actors.engines.sglang.host.embedding.parts import EmbedPart, Parts
from actors.engines.sglang.host.engine_process import OwnEngine
from actors.engines.sglang.host.kv import prefix_cache
from actors.engines.sglang.host.kv.rank_load import rank_loads
from actors.engines.sglang.host.liveness import scheduler_probe
from actors.engines.sglang.host.outputs import StepReceiver
from actors.engines.sglang.host.vectors import Rows, VectorStep
from protocol.errors import EngineRefused, InternalError, Overloaded, RequestError, Unsupported
from protocol.link.frames import Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, Pooling, TextItem, Vectors
from protocol.messages.engine import Done, EngineInfo, EngineLoad, GetInfo, GetLoad, Ping, RankLoad, WatchLoad
from protocol.messages.generation import Generate
from protocol.messages.kind import Message
from protocol.messages.operations import OPERATION_OF, FlushCache
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds

STREAMS_BESIDE = 16  # streams of control operations
RESERVED_TOKENS = translation.RESERVED_TOKENS + 1  # below SGLang's limit of a text; the one more is for an answer
ALLOW_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
OVERRIDES = "json_model_override_args"
WARM_UP = -1  # in place of a stream: the first request, which is the host's own
WARM_UP_ITEMS, WARM_UP_TOKENS, WARM_UP_WITHIN_S = 2, 16, 600.0
FLUSH_WITHIN_S = 10.0
SMALLEST_NORM = 1e-12


class EmbeddingHost:
    """Serves one link from one engine that computes vectors or scores."""

    def __init__(
        self,
        engine: OwnEngine,
        info: EngineInfo,
        model: EmbedderModel,
        peer: Peer,
        link: socket.socket,
        watchdog: Watchdog,
    ) -> None:
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.info = info
        self.model = model
        self.watchdog = watchdog
        self.link = ServedLink(link, peer, watchdog, self._received)
        self.parts = Parts(self.manager._dispatch_to_scheduler, info, has_types=model.has_types)  # noqa: SLF001
        self.liveness = scheduler_probe(self.manager, engine.get_all_child_pids())
        self.watchers = Watchers(self.link, BlockLog(""), self._loads)
        self._warm: asyncio.Future[EmbedPart] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Receive steps at `listener` from now on, and warm the engine; raises `RuntimeError` if it cannot compute."""
        receiver = StepReceiver[VectorStep](listener, self._stepped, self.watchdog.end)
        engine_process.take_over(self.engine, receiver, self.watchdog)
        rows = await self._first_rows()
        self.info = evolve(self.info, embedding=self._embedding_info(rows.shape[1]))
        await self.manager.freeze_gc()  # the scheduler's too: else a full collection visits all of SGLang and torch

    async def serve(self) -> str:
        """Carry the link until its end, and return the reason."""
        return await self.link.serve()

    async def _first_rows(self) -> Rows:
        """Return what the engine computes for a request of the host's own, and drop it from the cache."""
        length = max(2, min(WARM_UP_TOKENS, self.info.request_tokens_max))
        tokens = TokenIds.of(index % self.info.vocabulary_size for index in range(length))
        second_at = length // 2 if self.model.output is EmbeddingOutput.SCORES else 0
        self._warm = asyncio.get_running_loop().create_future()
        self.parts.start(WARM_UP, Embed("", (TextItem(tokens, second_at),) * WARM_UP_ITEMS))
        async with asyncio.timeout(WARM_UP_WITHIN_S):
            part = await self._warm
        self._warm = None
        if part.error is not None or part.rows is None or not np.isfinite(part.rows).all():
            why = "not in numbers" if part.error is None else part.error.detail
            raise RuntimeError(f"its own first request was not answered: {why}")
        if (why_not := await prefix_cache.flush(self.manager, FLUSH_WITHIN_S)) is not None:
            raise RuntimeError(f"its first request could not be forgotten: {why_not}")
        return part.rows

    def _embedding_info(self, width: int) -> EmbeddingInfo:
        """Return the properties of vectors of `width` elements; raises `RuntimeError` if they are not the model's."""
        if self.model.output is EmbeddingOutput.SCORES:
            if width != 1:
                raise RuntimeError(f"the engine computes {width} numbers for a pair, and a score is one")
            return EmbeddingInfo(EmbeddingOutput.SCORES, 1, Pooling.HEAD, normalised=False)
        pooling, normalised = self.engine._scheduler_init_result.scheduler_infos[0][poolers.POOLING]  # noqa: SLF001
        if Pooling(pooling) is not Pooling.LAST and not self.model.whole:
            raise RuntimeError(f"the engine pools by {pooling}, and may compute a text in pieces")
        config = self.manager.model_config
        dimensions = tuple(sorted(number for number in config.matryoshka_dimensions or () if number <= width))
        return EmbeddingInfo(
            EmbeddingOutput.VECTORS,
            width,
            Pooling(pooling),
            normalised=normalised,
            is_matryoshka=bool(config.is_matryoshka),
            matryoshka_dimensions=dimensions,
        )

    # Requests --------------------------------------------------------------------------

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                self._opened(frame)
            case Cancel() if not self.parts.cancel(frame.stream):
                self.watchers.cancel(frame.stream)
            case _:
                pass

    def _opened(self, frame: Open) -> None:
        request = self.link.request(frame)
        if isinstance(request, Embed):
            self._start(frame.stream, request)
        elif isinstance(request, Generate):
            self.link.fail(frame.stream, Unsupported("this engine computes vectors, and no answers"))
            self.link.flush()
        elif isinstance(request, WatchLoad):
            self.watchers.open(frame, request)
        elif request is not None:
            self.link.control(frame.stream, request, self._controlled)

    def _start(self, stream: int, request: Embed) -> None:
        try:
            if len(self.parts.by_stream) >= self.info.running_max + boot_message.PARTS_WAITING_MAX:
                raise Overloaded(f"the engine has {len(self.parts.by_stream)} requests")
            self.parts.start(stream, request)
        except RequestError as error:
            self.link.fail(stream, error)
            self.link.flush()

    def _stepped(self, step: VectorStep) -> None:
        """Answer the requests that a step has ended."""
        self.liveness.on_output()
        self.watchers.on_step()
        for part in self.parts.step(step):
            if self._warm is not None:  # the link is not connected yet
                self._warm.set_result(part)
            else:
                self._finish(part)

    def _finish(self, part: EmbedPart) -> None:
        if part.error is not None:
            self.link.fail(part.stream, part.error)
        elif part.rows is None or not np.isfinite(part.rows).all():
            self.link.fail(part.stream, InternalError("the model's vectors are no numbers"))
        else:
            self.link.messages.end(part.stream, self._vectors(part.rows, part.request.dimensions))
        self.link.flush()

    def _vectors(self, rows: Rows, dimensions: int | None) -> Vectors:
        """Return rows as a result: the sigmoids of scores, or the beginnings of vectors, normalised again."""
        if self.model.sigmoid:
            rows = np.exp(-np.logaddexp(np.float32(0), -rows))
        elif dimensions is not None and dimensions < rows.shape[1]:
            rows = rows[:, :dimensions]
            if self.info.embedding is not None and self.info.embedding.normalised:
                rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), SMALLEST_NORM)
        data = np.ascontiguousarray(rows, "<f4")
        return Vectors(Tensor(Dtype.FLOAT32, data.shape, memoryview(data.tobytes())))

    async def _loads(self) -> Sequence[RankLoad]:
        return await rank_loads(self.manager)

    # Control operations ----------------------------------------------------------------

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return self.info
            case Ping():
                return await self.liveness.probe(lambda: bool(self.parts.by_stream))
            case GetLoad():
                return EngineLoad.of_ranks(await self._loads()).totals
            case FlushCache():
                if await prefix_cache.flush_idle(self.manager, lambda: bool(self.parts.by_stream)) is not None:
                    raise Overloaded("the prefix cache is in use")
                return Done()
        raise EngineRefused(f"this engine computes vectors, and has no {type(request).__name__}")


def run(boot: BootMessage, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Run the engine that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    assert boot.task is not None
    folder = Path(boot.folder)
    engine_process.prepare(boot)
    try:
        given = str(boot.arguments.get(OVERRIDES, "{}"))
        model = read_model(Path(str(boot.arguments["model_path"])), boot.task, given)
        adapt(boot, model)
        os.environ[ALLOW_LONGER] = "1"  # SGLang wants places of an answer behind the longest text
        os.environ[poolers.OF_FILES] = poolers.variable(model.pooling, normalised=model.normalised)
        listener = outputs.listen(folder)
        engine = engine_process.start_engine(boot, watchdog)
        peer = Peer(boot.name, serves_max=boot.requests_max + boot_message.PARTS_WAITING_MAX + STREAMS_BESIDE)
        host = EmbeddingHost(engine, _info(engine, boot, model), model, peer, link, watchdog)
        engine.loop.run_until_complete(host.start(listener))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the reason of the failed start
        fail_start(boot.name, link, watchdog, error)
    engine_process.end(engine, folder, watchdog, engine.loop.run_until_complete(host.serve()))


def adapt(boot: BootMessage, model: EmbedderModel) -> None:
    """Change the arguments of an engine as its model needs them."""
    arguments = boot.arguments
    if model.whole:
        chunk = arguments.get("chunked_prefill_size")
        arguments |= {"disable_radix_cache": True, "chunked_prefill_size": -1}
        if chunk is not None:
            arguments.setdefault("max_prefill_tokens", chunk)
    if arguments.get("device") == "cpu" and not model.has_halves:
        arguments.setdefault("dtype", "float32")  # SGLang would halve it, which a CPU computes more slowly
    limits = [limit for limit in (arguments.get("context_length"), model.tokens_max) if isinstance(limit, int)]
    if limits:
        arguments["context_length"] = min(limits) + RESERVED_TOKENS
    if model.overrides:
        arguments[OVERRIDES] = json.dumps({**model.overrides, **json.loads(str(arguments.get(OVERRIDES, "{}")))})


def _info(engine: OwnEngine, boot: BootMessage, model: EmbedderModel) -> EngineInfo:
    found = translation.engine_info(engine, model_files.model_digest(Path(engine.server_args.model_path)))
    longest = found.request_tokens_max - 1
    return evolve(
        found,
        context_max=found.context_max - RESERVED_TOKENS,
        request_tokens_max=longest if model.tokens_max is None else min(longest, model.tokens_max),
        running_max=boot.requests_max,
        operations=(OPERATION_OF[FlushCache].name,),
    )
