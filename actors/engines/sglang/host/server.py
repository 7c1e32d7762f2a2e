"""The engine's host: one SGLang engine in a process of its own, which answers its node over a link.

SGLang blocks its interpreter while it loads, installs signal handlers, and ends by killing its process group: so it has
a process of its own, and the node only ever sees a link that ends. The link has the frames and the state table of any
other, over a Unix socket. The scheduler keeps its tokenizer (grammars and `min_new_tokens` need it), but no detokenizer
process runs: token ids come straight here, and each engine step becomes one frame, so that the price of a step on the
node does not grow with the requests in it. asyncio is SGLang's own loop and stays in this folder. The host may decide
nothing about a request: deadlines, retries and admission are the node's. Written for SGLang 0.5.23; only this folder
touches SGLang's private names.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn
from uuid import uuid4

from attrs import evolve
from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

from actors.engines import leftover_memory, model_files
from actors.engines.adapter_table import AdapterTable
from actors.engines.blocks.block_log import BlockLog
from actors.engines.host.adapters import Adapters, first_adapters
from actors.engines.host.failed_start import fail_start
from actors.engines.host.liveness import POLL_S
from actors.engines.host.served_link import ServedLink, last_line
from actors.engines.host.watchdog import Watchdog
from actors.engines.host.watchers import Watchers
from actors.engines.media_check import check_media
from actors.engines.sglang import boot_message, hand_off
from actors.engines.sglang.host import engine_process, outputs, translation
from actors.engines.sglang.host.adapters import SglangAdapterLoader
from actors.engines.sglang.host.engine_process import OwnEngine, take_over
from actors.engines.sglang.host.expert_records import ExpertRecords
from actors.engines.sglang.host.follower_rank import serve_follower_rank
from actors.engines.sglang.host.kept_files import KeptFiles, kept_files_of
from actors.engines.sglang.host.kv.kv_events import EventSource, KvEventReceivers
from actors.engines.sglang.host.kv.rank_load import rank_loads
from actors.engines.sglang.host.liveness import scheduler_probe
from actors.engines.sglang.host.metrics import MetricsReader, read_files
from actors.engines.sglang.host.operations import Operations
from actors.engines.sglang.host.outputs import StepOutput, StepReceiver
from actors.engines.sglang.host.profiles import profiles_of
from actors.engines.sglang.host.requests import Requests, Running, SeparatePart
from actors.engines.sglang.host.vision.media_input import MediaInput, media_info
from actors.engines.sglang.host.vision.pixels import folder_layout
from actors.engines.sglang.host.vision.scheduler_tensors import SchedulerTensors
from actors.engines.sglang.host.warm_up import warm_up
from actors.engines.sglang.host.weights import WeightUpdates
from protocol.errors import AskerLeft, EngineRefused, InternalError, NotReady, RequestError, Unsupported
from protocol.link.frames import Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.engine import Alive, EngineInfo, EngineLoad, GetInfo, GetLoad, Ping, RankLoad, WatchLoad
from protocol.messages.generation import Generate
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks
from protocol.messages.media import MediaForm
from protocol.messages.operations import operation_names

CONTROL_STREAMS = 16  # beside one stream a slot
EVENTS_CLOSED_WITHIN_S = 1.0


class Host:
    """Serves one link from one engine."""

    def __init__(
        self,
        engine: OwnEngine,
        info: EngineInfo,
        peer: Peer,
        link: socket.socket,
        watchdog: Watchdog,
        media: MediaInput | None = None,
        *,
        adapters: Adapters,
        sources: tuple[EventSource, ...] = (),
        files: KeptFiles | None = None,
        expert_ranks: int = 0,
    ) -> None:
        self.engine = engine
        self.media = media
        self.manager = engine.tokenizer_manager
        self.watchdog = watchdog
        self.link = ServedLink(link, peer, watchdog, self._received)
        self.adapters = adapters
        self.requests = Requests(self.manager, self.adapters.table.release)
        self.liveness = scheduler_probe(self.manager, engine.get_all_child_pids(), info.data_parallel)
        blocks = BlockLog(uuid4().hex)
        self.events = KvEventReceivers(blocks, sources)
        self.watchers = Watchers(self.link, blocks, self._loads)
        metrics = MetricsReader(read_files) if info.metrics else None
        self.profiles = None if files is None else profiles_of(engine, files)
        others = [adapters.handlers]
        if files is not None and self.profiles is not None:
            others += [files.handlers, self.profiles.handlers]
        if files is not None and expert_ranks:
            others.append(ExpertRecords(self.manager, files, expert_ranks).handlers)
        self.operations = Operations(self.manager, self.requests.by_id.keys, metrics, blocks, *others)
        self.weights: WeightUpdates | None = None
        self._info = evolve(info, operations=operation_names(self.operations.handlers))

    @property
    def info(self) -> EngineInfo:
        """The properties of the engine at this moment."""
        return evolve(self._info, adapters=self.adapters.table.adapters)

    def take_weights(self) -> None:
        """Take new weights by operations, from now on."""
        self.weights = WeightUpdates.of(self.manager, self.operations.standstill, self.link.end)
        self.operations.add(self.weights.handlers)
        self._info = evolve(self._info, operations=operation_names(self.operations.handlers))

    async def start(self, listener: socket.socket) -> None:
        """Receive steps at `listener` from now on, and warm the engine; raises `RuntimeError` if it cannot answer."""
        take_over(self.engine, StepReceiver(listener, self._stepped, self.watchdog.end), self.watchdog)
        self.events.start()
        await self._warm_up()
        await self.manager.freeze_gc()  # the scheduler's too: else a full collection visits all of SGLang and torch

    async def serve(self) -> str:
        """Carry the link until its end, close the receivers of events, and return the reason."""
        reason = await self.link.serve()
        await self.events.stop(EVENTS_CLOSED_WITHIN_S)
        return reason

    async def _warm_up(self) -> None:
        mode, media = self.engine.server_args.disaggregation_mode, self.media
        if media is None or (about := media.picture()) is None:
            await warm_up(self.manager, self.info, mode)
            return
        picture = await media.output(about)
        try:
            await warm_up(self.manager, self.info, mode, picture)
        finally:
            media.discard(picture)

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                self._opened(frame)
            case Cancel():
                if (running := self.requests.by_stream.get(frame.stream)) is not None:
                    self._abort(running)
                else:
                    self.watchers.cancel(frame.stream)
            case _:
                pass

    def _opened(self, frame: Open) -> None:
        request = self.link.request(frame)
        if isinstance(request, Generate) and self.operations.standstill.lasts:
            self.link.messages.fail(frame.stream, NotReady("the engine stands still"))
            self.link.flush()
        elif isinstance(request, Generate):
            scored_tokens = request.scored_tokens if request.prompt_logprobs else None
            running = Running(request.id, frame.stream, request.logprobs, scored_tokens, request.adapter)
            if self._info.returns_states:
                running.state = hand_off.state(self._info, request, number=uuid4().int)
                request = evolve(request, hand_off=running.state)
            self._start(running, request)
        elif isinstance(request, WatchBlocks | WatchLoad):
            self.watchers.open(frame, request)
        elif request is not None:
            self.link.control(frame.stream, request, self._controlled)

    # One request -----------------------------------------------------------------------

    def _start(self, running: Running, request: Generate) -> None:
        if request.adapter is not None:
            try:
                self.adapters.table.take(request.adapter)
            except RequestError as error:
                self.link.fail(running.stream, error)
                self.link.flush()
                return
        self.requests.add(running)
        running.task = asyncio.get_running_loop().create_task(self._generate(running, request))

    async def _generate(self, running: Running, request: Generate) -> None:
        """Drive SGLang's own bookkeeping of one request; its tokens and its end come through `_stepped`."""
        last = output = None
        try:
            if request.media:
                output = await self._output(request)
                request = evolve(request, media=())
                self.link.messages.ended(running.stream)  # the memory of its tensors is not needed any more
            else:
                check_media(request, self.info)  # a prompt with placeholders and no images is wrong
            traced = self.manager.enable_trace
            sglang_request = translation.sglang_request(request, self.info, output, traced=traced)
            async for out in self.manager.generate_request(sglang_request, None):
                last = out
        except RequestError as error:  # wrong images or videos, or a wrong hand-off
            self._fail(running, error)
        except (ValueError, TypeError, OverflowError) as error:  # SGLang's own checks
            self._fail(running, EngineRefused(str(error)))
        except Exception as error:  # noqa: BLE001  # a fault of SGLang: this request fails, and the engine ends if that is frequent
            self._fail(
                running, InternalError(f"the engine failed the request: {type(error).__name__}"), last_line(error)
            )
        else:
            # Else it ended outside a step: it was refused, or aborted while it waited.
            if running.id in self.requests.by_id and not running.is_held:
                self._fail(running, translation.abort_error(last["meta_info"]["finish_reason"] if last else {}))
        finally:
            if output is not None and self.media is not None:
                self.media.discard(output)  # unsent tensors; a scheduler has removed the names of sent ones

    async def _output(self, request: Generate) -> MultimodalProcessorOutput:
        if self.media is None:
            raise Unsupported("this engine takes neither images nor videos")
        return await self.media.output(request)

    def _abort(self, running: Running) -> None:
        """Stop a request at any point of its life."""
        state = self.manager.rid_to_state.get(running.id)
        if state is not None and state.dispatched:
            running.is_left = True
            self.manager.abort_request(running.id)  # the scheduler answers with the end
        elif running.task is not None:  # it was not sent to the scheduler yet, so SGLang holds nothing for it
            running.task.cancel()
            self._fail(running, AskerLeft("the asker left"))

    def _stepped(self, output: StepOutput) -> None:
        """Send one engine step as one frame, and the failures in it after that."""
        self.liveness.on_output()
        self.watchers.on_step()
        step, parts, failed = self.requests.step(output)
        for ended in step.ended:
            self.link.messages.ended(ended.stream)
        if step.streams:
            self.link.peer.send(step)
        for part in parts:
            self._answer_alone(part)
        for stream, error in failed:
            self.link.fail(stream, error)
        if step.streams or parts or failed:  # else the link may not be connected yet
            self.link.flush()

    def _answer_alone(self, part: SeparatePart) -> None:
        """Send a part of an answer by frames of its own, which wait for the attachments among them."""
        running = part.running
        try:
            for reply in part.replies:
                self.link.messages.reply(running.stream, reply)
        except RequestError as error:  # the link takes no attachment of that size
            if part.result is None:
                self.requests.remove(running)
                self.manager.abort_request(running.id)
            self.link.messages.fail(running.stream, error)
        else:
            if part.result is not None:
                self.link.messages.end(running.stream, part.result)

    def _fail(self, running: Running, error: RequestError, cause: str = "") -> None:
        if running.id in self.requests.by_id:
            self.requests.remove(running)
            self.link.fail(running.stream, error, cause)
            self.link.flush()

    def _computes(self) -> bool:
        """Whether the schedulers may be at work for long before they answer."""
        return bool(self.requests.by_id) or (self.profiles is not None and self.profiles.busy)

    async def _loads(self) -> Sequence[RankLoad]:
        return await rank_loads(self.manager)

    # Control operations ----------------------------------------------------------------

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return self.info
            case Ping():
                if self.operations.hold_up or (self.weights is not None and self.weights.loads):
                    await asyncio.sleep(POLL_S)
                    return Alive(held_up=True)
                return await self.liveness.probe(self._computes)
            case GetLoad():
                return EngineLoad.of_ranks(await self._loads()).totals
        return await self.operations.operate(request)


def run(boot: boot_message.BootMessage, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Run the engine that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    folder, rank = Path(boot.folder), boot.arguments.get("node_rank")
    engine_process.prepare(boot)
    try:
        listener = outputs.listen(folder)
        table = first_adapters(boot.adapters, str(boot.arguments["model_path"]))
        if boot.adapters is not None:
            boot.arguments["lora_paths"] = boot_message.lora_paths(table.folders)
        engine = engine_process.start_engine(boot, watchdog)
        requests_max = engine.server_args.max_running_requests * engine.server_args.dp_size
        peer = Peer(boot.name, serves_max=requests_max + CONTROL_STREAMS)
        host = None if rank else _host(boot, engine, peer, link, watchdog, table)
        if host is not None:
            host.take_weights()
            engine.loop.run_until_complete(host.start(listener))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the reason of the failed start
        fail_start(boot.name, link, watchdog, error)
    reason = serve_follower_rank(peer, link, watchdog) if host is None else engine.loop.run_until_complete(host.serve())
    engine_process.end(engine, folder, watchdog, reason)


def _host(
    boot: boot_message.BootMessage,
    engine: OwnEngine,
    peer: Peer,
    link: socket.socket,
    watchdog: Watchdog,
    table: AdapterTable,
) -> Host:
    folder = engine.server_args.model_path
    layout, form = folder_layout(folder), MediaForm.PIXELS if boot.has_tower else MediaForm.EMBEDDINGS
    media = media_info(engine.tokenizer_manager, layout, form)
    digest = model_files.model_digest(Path(folder))
    info = translation.engine_info(engine, digest, media, sequential=boot.sequential)
    sources = tuple(EventSource(rank, event.endpoint, event.replay_endpoint) for rank, event in enumerate(boot.events))
    files = kept_files_of(boot.files, boot.files_bytes_max)
    adapters = Adapters(SglangAdapterLoader(engine.tokenizer_manager), folder, boot.adapters, table)
    taken = None
    if media is not None and layout is not None:
        tensors = SchedulerTensors(leftover_memory.record_tensors(Path(boot.folder)))
        taken = MediaInput(engine.tokenizer_manager, info, layout, tensors)
    return Host(
        engine,
        info,
        peer,
        link,
        watchdog,
        taken,
        adapters=adapters,
        sources=sources,
        files=files,
        expert_ranks=boot.expert_ranks,
    )
