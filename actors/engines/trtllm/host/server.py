"""The engine's host: one TensorRT-LLM engine in a process of its own, which answers its node over a link.

Each request is one asyncio task over the iterator that the engine returns for it. An abort is never believed: nothing
acknowledges one, so a stream ends when the engine's iteration ends, and its slot is counted until then. An error of a
request fails the request. After any other error the engine is not trusted: the host ends, and its node starts another.
The host may decide nothing about a request: deadlines, retries and admission are the node's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast
from uuid import uuid4

from attrs import evolve

from actors.engines import leftover_memory, model_files
from actors.engines.adapter_table import AdapterTable
from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.adapters import Adapters, first_adapters
from actors.engines.host.failed_start import fail_start
from actors.engines.host.served_link import ServedLink, last_line
from actors.engines.host.watchdog import Watchdog, print_reason
from actors.engines.host.watchers import Watchers
from actors.engines.trtllm.boot_message import TrtllmBoot
from actors.engines.trtllm.handed import state_of
from actors.engines.trtllm.host import library, translation
from actors.engines.trtllm.host.adapters import TrtllmAdapterLoader
from actors.engines.trtllm.host.engine_state import TrtllmState
from actors.engines.trtllm.host.library import CALL_ERRORS, Library, Llm, Result
from actors.engines.trtllm.host.memory import TrtllmMemory
from actors.engines.trtllm.host.operations import TrtllmOperations
from actors.engines.trtllm.host.prefix_cache import PrefixCache
from actors.engines.trtllm.host.requests import OutgoingSteps, TrtllmRequest
from actors.engines.trtllm.host.translation import AnswerPart, Reader
from actors.engines.trtllm.images import Outline
from actors.engines.trtllm.signatures import GENERATE, Signatures
from protocol.errors import (
    AskerLeft,
    EngineRefused,
    HandOffFailed,
    InternalError,
    NotReady,
    RequestError,
    Unsupported,
)
from protocol.link.frames import Cancel, Frame, Open, Step
from protocol.link.peer import Peer
from protocol.messages.engine import Alive, EngineInfo, EngineLoad, GetInfo, GetLoad, Ping, RankLoad, WatchLoad
from protocol.messages.generation import Finished, Generate, Started, Tokens, Usage
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks
from protocol.messages.operations import operation_names

if TYPE_CHECKING:
    from actors.engines.trtllm.host.image_input import ImageInput

CONTROL_STREAMS = 16  # beside one stream a slot
WAITING_MAX = 256  # requests that wait inside a rank


class TrtllmHost:
    """Serves one link from one engine."""

    def __init__(
        self,
        llm: Llm,
        names: Library,
        info: EngineInfo,
        ends: tuple[int, ...],
        peer: Peer,
        link: socket.socket,
        watchdog: Watchdog,
        boot: TrtllmBoot,
        table: AdapterTable,
    ) -> None:
        self.llm = llm
        self.publishes = boot.publishes
        self.images = None if info.media is None else image_input(llm, names, info, translation.model_folder(boot))
        self.names = names
        self.ends = ends
        self.link = ServedLink(link, peer, watchdog, self._received)
        self.by_stream: dict[int, TrtllmRequest] = {}
        self.outgoing = OutgoingSteps(self._send)
        blocks = BlockLog(uuid4().hex)
        self.cache = PrefixCache()
        self.state = TrtllmState(llm, info, blocks, self.cache, self.link.end)
        self.loras = TrtllmAdapterLoader(llm, names, self.link.end, lambda: self.memory.takes_requests)
        self.adapters = Adapters(self.loras, str(translation.model_folder(boot)), boot.adapters, table)
        self.memory = TrtllmMemory(
            llm, info.version, self._in_engine, self._forget_kv_cache, self.link.end, owns_weights=boot.owns_weights
        )
        others = [self.adapters.handlers, *([self.memory.handlers] if boot.releases_memory else [])]
        forget_blocks = self.state.forget_blocks
        self.operations = TrtllmOperations(info.version, self._in_engine, self.cache, forget_blocks, *others)
        self.info = translation.with_operations(info, operation_names(self.operations.handlers))
        self.watchers = Watchers(self.link, blocks, self._loads)

    def _in_engine(self) -> Collection[int]:
        """Return what computes in the engine: the streams of requests, and the numbers of adapters that are loaded."""
        return [*self.by_stream, *self.loras.loading]

    async def start(self) -> None:
        """Load the first adapters; a dispensable one that the engine refuses is left out."""
        limits = self.adapters.limits
        for name, folder in self.adapters.table.folders.items():
            try:
                await self.loras.load(name, folder)
            except EngineRefused as error:
                if limits is None or name not in limits.dispensable:
                    raise
                sys.stderr.write(f"adapter {name} in {folder}: {error}\n")
                self.adapters.table.remove(name)

    async def serve(self) -> str:
        """Carry the link until its end, and return the reason."""
        self.state.start(publishes=self.publishes)
        return await self.link.serve()

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                self._opened(frame)
            case Cancel():
                if (running := self.by_stream.get(frame.stream)) is not None:
                    self._leave(running)
                else:
                    self.watchers.cancel(frame.stream)
            case _:
                pass

    def _opened(self, frame: Open) -> None:
        request = self.link.request(frame)
        if isinstance(request, Generate) and not self.memory.takes_requests:
            self.link.messages.fail(frame.stream, NotReady("its memory is released"))
        elif isinstance(request, Generate):
            self._start(frame.stream, request)
        elif isinstance(request, WatchBlocks | WatchLoad):
            self.watchers.open(frame, request)
        elif request is not None:
            self.link.control(frame.stream, request, self._controlled)

    # One request -----------------------------------------------------------------------

    def _start(self, stream: int, request: Generate) -> None:
        try:
            self._begin(stream, request)
        except RequestError as error:
            if (running := self.by_stream.get(stream)) is not None:
                self._forget(running)
            self.link.fail(stream, error)
            self.link.flush()

    def _begin(self, stream: int, request: Generate) -> None:
        state = translation.state_for(request, self.info)  # the node has checked it
        reader = Reader(request, self.ends, None if state is None else state.cached_tokens)
        running = TrtllmRequest(request, stream, reader)
        if request.adapter is not None:
            self.adapters.table.take(request.adapter)
        self.by_stream[stream] = running
        if state is not None and state.ending is not None:
            self._answer(running, translation.whole_answer(request, state))
            return
        running.waits_for_transfer = state is not None
        running.task = asyncio.get_running_loop().create_task(self._generate(running))

    async def _generate(self, running: TrtllmRequest) -> None:
        try:
            result = await self._ask(running)
            running.result = result
            running.abort_if_safe()
            async for step in result:
                self._stepped(running, step)
            self._ended(running)
        except RequestError as error:
            await self._let_end(running)
            self._fail(running, self._own_end(running) if isinstance(error, AskerLeft) and not running.left else error)
        except self.names.request_error as error:  # of this request alone
            self._fail(running, translation.request_error(error, waits_for_transfer=running.waits_for_transfer))
        except Exception as error:  # noqa: BLE001  # the engine itself cannot be trusted any more
            why = last_line(error)
            self._fail(running, InternalError(f"the engine failed the request: {type(error).__name__}"))
            self.link.end(f"the engine failed: {why}")

    async def _let_end(self, running: TrtllmRequest) -> None:
        """Stop a request that has failed here, and wait until the engine's iteration over it ends: it has the slot."""
        if running.result is None:
            return
        running.result.abort()
        try:
            async for _ in running.result:
                self.state.on_step()
        except Exception as error:  # noqa: BLE001  # the first error is the request's
            last_line(error)

    def _own_end(self, running: TrtllmRequest) -> RequestError:
        """Return the error of a request that the engine has ended by itself."""
        if running.waits_for_transfer:  # no fault of this engine: the prefill may have died
            return HandOffFailed("the engine ended the request before the KV cache had come")
        return InternalError("the engine ended the request by itself")

    async def _ask(self, running: TrtllmRequest) -> Result:
        try:
            return await self._asked(running)
        except Exception as error:
            if running.shared is not None:
                running.shared.open_all()
            if isinstance(error, CALL_ERRORS):
                raise EngineRefused(str(error)) from error
            raise

    async def _asked(self, running: TrtllmRequest) -> Result:
        arguments = translation.call(self.names, running.request, self.info, self.ends)
        if (adapter := running.request.adapter) is not None:
            arguments["lora_request"] = self.loras.lora_request(adapter.name)
        if self.images is not None:
            arguments, running.shared = await self.images.arguments(running.request, arguments)
        if (salt := self.cache.salt(cast("str | None", arguments.get("cache_salt")))) is not None:
            arguments["cache_salt"] = salt
        return self.llm.generate_async(**arguments)

    def _leave(self, running: TrtllmRequest) -> None:
        """Stop a request at any point of its life."""
        if running.result is None:  # the engine does not know it yet
            if running.task is not None:
                running.task.cancel()
            self._fail(running, AskerLeft("the asker left"))
        elif running.state:  # the engine has ended it, and holds its KV cache for the decode
            running.leave()
            self._fail(running, AskerLeft("the asker left"))
        else:
            running.leave()

    def _stepped(self, running: TrtllmRequest, result: Result) -> None:
        """Send what a step has added to an answer."""
        self.state.on_step()
        self.watchers.on_step()
        part = running.reader.read(result)
        if part.tokens is not None and running.waits_for_transfer:
            running.waits_for_transfer = False
            running.abort_if_safe()
        if running.left or running.stream not in self.by_stream:
            return
        if self.info.returns_states:
            self._hand_over(running, result, part)
        else:
            self._answer(running, part)

    def _hand_over(self, running: TrtllmRequest, result: Result, part: AnswerPart) -> None:
        """Answer with the state of a computed prompt, which is held until the request is left."""
        answer, cached_tokens = result.outputs[0], part.cached_tokens
        running.state = state_of(running.request, self.info, answer, ending=part.ending, cached_tokens=cached_tokens)
        started = Started(part.cached_tokens, hand_off=running.state, scores=part.scores)
        self.link.messages.reply(running.stream, started)
        self.link.flush()

    def _answer(self, running: TrtllmRequest, part: AnswerPart) -> None:
        """Send a part of an answer."""
        if running.request.prompt_logprobs:
            self._answer_alone(running, part)
        elif part.tokens is not None or part.ending is not None:
            self.outgoing.add(running, part)
        if part.ending is not None:
            self._forget(running)

    def _answer_alone(self, running: TrtllmRequest, part: AnswerPart) -> None:
        """Send a part of an answer by frames of its own, which wait for the attachments among them."""
        replies: list[Started | Tokens] = []
        if part.tokens is not None:
            if not running.begun:
                running.begun = True
                replies.append(Started(part.cached_tokens, scores=part.scores))
            running.tokens += len(part.tokens.ids)
            replies.append(part.tokens)
        for reply in replies:
            self.link.messages.reply(running.stream, reply)
        if (end := part.ending) is not None:
            usage = Usage(len(running.request.tokens), running.tokens, part.cached_tokens)
            self.link.messages.end(running.stream, Finished(end.reason, usage, end.matched))
        self.link.flush()

    def _ended(self, running: TrtllmRequest) -> None:
        """End a stream whose iteration is over without an end of the answer."""
        if running.stream in self.by_stream and not running.state:
            left = AskerLeft("the asker left")
            self._fail(running, left if running.left else self._own_end(running))

    def _forget(self, running: TrtllmRequest) -> None:
        del self.by_stream[running.stream]
        if (adapter := running.request.adapter) is not None:
            self.adapters.table.release(adapter)

    def _fail(self, running: TrtllmRequest, error: RequestError) -> None:
        if self.by_stream.get(running.stream) is running:
            self._forget(running)
            self.outgoing.flush()
            self.link.fail(running.stream, error)
            self.link.flush()

    def _send(self, step: Step) -> None:
        self.link.peer.send(step)
        self.link.flush()

    def _forget_kv_cache(self) -> None:
        """Note that the KV cache has lost its contents: no request may find a block from before."""
        self.cache.flush()
        self.state.forget_blocks()

    # Control operations ----------------------------------------------------------------

    async def _loads(self) -> list[RankLoad]:
        return self.state.loads(self.by_stream.values())

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return evolve(self.info, adapters=self.adapters.table.adapters)
            case Ping():
                await self.state.probe(self._computes)
                return Alive()
            case GetLoad():
                return EngineLoad.of_ranks(await self._loads()).totals
        return await self.operations.operate(request)

    def _computes(self) -> bool:
        """Whether a step is due: the engine has a request that waits for no other engine."""
        running = self.by_stream.values()
        return any(each.result is not None and not each.waits_for_transfer and not each.state for each in running)


def image_input(llm: Llm, names: Library, info: EngineInfo, folder: Path) -> ImageInput:
    """Return the input maker of a model with images."""
    from actors.engines.trtllm.host.image_input import ImageInput  # noqa: PLC0415  # torch, which other models do without

    return ImageInput(llm, names, info, Outline.of(model_files.read_files(folder)))


def run(boot: TrtllmBoot, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Run the engine that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    try:
        library.require()
        names = Library()
        folder = translation.model_folder(boot)
        table = first_adapters(boot.adapters, str(folder))
        if boot.adapters is not None and not Signatures.of(names.version).has(GENERATE, "cache_salt"):
            raise Unsupported(f"TensorRT-LLM {names.version} cannot keep the cached prompts of adapters apart")  # noqa: TRY301
        llm = names.start(boot.arguments)
        info = translation.engine_info(boot, names.version, model_files.model_digest(folder), uuid4().hex)
        ends = translation.end_tokens(folder)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the reason of the failed start
        if not isinstance(error, ModuleNotFoundError):
            traceback.print_exception(error, file=sys.stderr)
        fail_start(boot.name, link, watchdog, error)
    leftover_memory.record(Path(boot.folder), leftover_memory.mapped())
    peer = Peer(boot.name, serves_max=boot.data_parallel * (boot.slots + WAITING_MAX) + CONTROL_STREAMS)
    host = TrtllmHost(llm, names, info, ends, peer, link, watchdog, boot, table)
    reason = asyncio.run(_serve(host, watchdog, partial(fail_start, boot.name, link, watchdog)))
    print_reason(reason)
    watchdog.unwatch_children()
    llm.shutdown()
    leftover_memory.remove(Path(boot.folder))
    os._exit(0)


async def _serve(host: TrtllmHost, watchdog: Watchdog, fail: Callable[[Exception], NoReturn]) -> str:
    loop = asyncio.get_running_loop()
    for handled in (signal.SIGTERM, signal.SIGQUIT):
        loop.add_signal_handler(handled, watchdog.end, handled.name)
    try:
        await host.start()
    except Exception as error:  # noqa: BLE001  # any error is the reason of the failed start
        fail(error)
    return await host.serve()
