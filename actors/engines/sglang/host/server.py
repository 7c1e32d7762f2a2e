"""The engine's host: one SGLang engine in a process of its own, which answers its node over a link.

SGLang blocks its interpreter while it loads, installs signal handlers, and ends by killing its process group: so it has
a process of its own, and the node only ever sees a link that ends. The link has the frames and the state table of any
other, over a Unix socket. The scheduler keeps its tokenizer (grammars and `min_new_tokens` need it), but no detokenizer
process runs: token ids come straight here, and each engine step becomes one frame, so that the price of a step on the
node does not grow with the requests in it. asyncio is SGLang's own loop and stays in this folder. The host may decide
nothing about a request: deadlines, retries and admission are the node's. Written for SGLang 0.5.23; what is private to
SGLang is touched in this folder alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs

from actors.engines.sglang import boot_message, model_files, shared_memory
from actors.engines.sglang.host import outputs, scheduler, transfer_delay, translation
from actors.engines.sglang.host.failures import FailureRate
from actors.engines.sglang.host.follower_rank import pin_to_core, serve_follower_rank
from actors.engines.sglang.host.liveness import LivenessProbe
from actors.engines.sglang.host.outputs import StepOutput, StepReceiver
from actors.engines.sglang.host.requests import Requests, Running
from actors.engines.sglang.host.warm_up import warm_up
from actors.engines.sglang.host.watchdog import Watchdog, print_reason
from protocol import codec
from protocol.errors import (
    AskerLeft,
    EngineRefused,
    InternalError,
    LocalViolation,
    Overloaded,
    PeerViolation,
    RequestError,
)
from protocol.frames import Bye, Cancel, End, Fail, Frame, Open
from protocol.kind import Message
from protocol.messages import Done, EngineInfo, EngineLoad, FlushCache, Generate, GetInfo, GetLoad, Ping
from protocol.peer import Peer

READ_BYTES = 256 * 1024
CONTROL_STREAMS = 16  # beside one stream a slot


class _Engine(Engine):
    """SGLang's engine without its detokenizer process, and with a scheduler that aborts at once."""

    run_scheduler_process_func = staticmethod(scheduler.run)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: object) -> tuple[list[object], list[str]]:
        return [], []


def _hook_ports(folder: Path) -> None:
    """Send the scheduler's output to the tokenizer manager, and record what the engine will leave in /dev/shm."""
    init_new = PortArgs.init_new

    def hooked(*args: object, **kwargs: object) -> PortArgs:
        ports = init_new(*args, **kwargs)
        ports.detokenizer_ipc_name = ports.tokenizer_ipc_name
        shared_memory.record(folder, {Path(shm_path_for(ports.instance_id)).name})
        return ports

    PortArgs.init_new = staticmethod(hooked)


class Host:
    """Serves one link from one engine."""

    def __init__(self, engine: _Engine, info: EngineInfo, peer: Peer, link: socket.socket, watchdog: Watchdog) -> None:
        self.engine = engine
        self.info = info
        self.manager = engine.tokenizer_manager
        self.peer = peer
        self.link = link
        self.watchdog = watchdog
        self.requests = Requests(self.manager)
        self.controls: set[asyncio.Task[None]] = set()
        self.liveness = LivenessProbe(self.manager, engine.get_all_child_pids())
        self.failures = FailureRate(time.monotonic)
        self.failing = asyncio.Event()
        self.end_reason = ""

    async def start(self, listener: socket.socket) -> None:
        """Receive steps at `listener` from now on, and warm the engine; raises `RuntimeError` if it cannot answer."""
        loop = asyncio.get_running_loop()
        StepReceiver(listener, self._stepped, self.watchdog.end).start(loop)
        self.manager.auto_create_handle_loop()
        # SGLang has just installed signal handlers that drain for seconds, and a watchdog: `Watchdog` replaces both.
        for handled in (signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(handled, self.watchdog.end, handled.name)
        if self.manager._subprocess_watchdog is not None:  # noqa: SLF001
            self.manager._subprocess_watchdog.stop()  # noqa: SLF001
        await warm_up(self.manager, self.info, self.engine.server_args.disaggregation_mode)
        await self.manager.freeze_gc()  # the scheduler's too: else a full collection visits all of SGLang and torch

    async def serve(self) -> str:
        """Answer the node until its Bye, or until the engine has failed too often, and return the reason."""
        loop = asyncio.get_running_loop()
        reader, self.writer = await asyncio.open_connection(sock=self.link)
        self._flush()  # Hello: this engine is ready
        reading, failing = loop.create_task(self._read(reader)), loop.create_task(self.failing.wait())
        await asyncio.wait({reading, failing}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        self._send(Bye("failing", self.end_reason))
        await self.writer.drain()
        return self.end_reason

    async def _read(self, reader: asyncio.StreamReader) -> str:
        while data := await reader.read(READ_BYTES):
            try:
                for frame in self.peer.receive_data(data):
                    if isinstance(frame, Bye):
                        return frame.detail
                    self._received(frame)
                self._flush()  # what the state machine of the link sends by itself
            except (PeerViolation, LocalViolation) as error:
                self._send(Bye("peer_violation" if isinstance(error, PeerViolation) else "internal", str(error)))
                raise
        return self.watchdog.end("the link to the node is closed")

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                request = codec.decode(frame.body)
                if isinstance(request, Generate):
                    self._start(Running(request.id, frame.stream, request.logprobs), request)
                else:
                    task = asyncio.get_running_loop().create_task(self._control(frame.stream, request))
                    self.controls.add(task)
                    task.add_done_callback(self.controls.discard)
            case Cancel():
                if (running := self.requests.by_stream.get(frame.stream)) is not None:
                    self._abort(running)
            case _:
                pass

    # One request -----------------------------------------------------------------------

    def _start(self, running: Running, request: Generate) -> None:
        self.requests.add(running)
        running.task = asyncio.get_running_loop().create_task(self._generate(running, request))

    async def _generate(self, running: Running, request: Generate) -> None:
        """Drive SGLang's own bookkeeping of one request; its tokens and its end come through `_stepped`."""
        last = None
        try:
            sglang_request = translation.sglang_request(
                request, honours_seed=self.info.honours_seed, traced=self.manager.enable_trace
            )
            async for out in self.manager.generate_request(sglang_request, None):
                last = out
        except (ValueError, TypeError, OverflowError) as error:  # SGLang's own checks
            self._fail(running, EngineRefused(str(error)))
        except Exception as error:  # noqa: BLE001  # a fault of SGLang: this request fails, and the engine ends if that is frequent
            self._fail(
                running, InternalError(f"the engine failed the request: {type(error).__name__}"), _last_line(error)
            )
        else:
            if running.id in self.requests.by_id:  # it ended outside a step: refused, or aborted while it waited
                self._fail(running, translation.abort_error(last["meta_info"]["finish_reason"] if last else {}))

    def _abort(self, running: Running) -> None:
        """Stop a request at whatever point it has reached."""
        state = self.manager.rid_to_state.get(running.id)
        if state is not None and state.dispatched:
            self.manager.abort_request(running.id)  # the scheduler answers with the end
        elif running.task is not None:  # it was not sent to the scheduler yet, so SGLang holds nothing for it
            running.task.cancel()
            self._fail(running, AskerLeft("the asker left"))

    def _stepped(self, output: StepOutput) -> None:
        """Send one engine step as one frame, and the failures in it after that."""
        self.liveness.on_output()
        step, failed = self.requests.step(output)
        if step.streams:
            self.peer.send(step)
        for stream, error in failed:
            self._failed(stream, error)
        if step.streams or failed:  # else nobody may have been connected yet
            self._flush()

    def _fail(self, running: Running, error: RequestError, cause: str = "") -> None:
        if running.id in self.requests.by_id:
            self.requests.remove(running)
            self._failed(running.stream, error, cause)
            self._flush()

    def _failed(self, stream: int, error: RequestError, cause: str = "") -> None:
        """Fail a stream; if SGLang fails too many in a while, end the engine, with the `cause` of the last."""
        self.peer.send(Fail(stream, error.code, error.detail))
        reason = self.failures.record(cause or error.detail) if isinstance(error, InternalError) else None
        if reason is not None and not self.failing.is_set():
            self.end_reason = reason
            self.failing.set()

    # Control operations ----------------------------------------------------------------

    async def _control(self, stream: int, request: Message) -> None:
        try:
            self._send(End(stream, codec.encode(await self._controlled(request))))
        except RequestError as error:
            self._send(Fail(stream, error.code, error.detail))
        except Exception as error:  # noqa: BLE001  # as with a request
            sentence = f"{type(request).__name__} failed: {type(error).__name__}"
            self._failed(stream, InternalError(sentence), _last_line(error))
            self._flush()

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return self.info
            case Ping():
                await self.liveness.probe(running=bool(self.requests.by_id))
                return Done()
            case GetLoad():
                loads = await self.manager.get_loads()
                return EngineLoad(
                    running=sum(load.num_running_reqs for load in loads),
                    waiting=sum(load.num_waiting_reqs for load in loads),
                    kv_tokens_used=sum(load.num_used_tokens for load in loads),
                )
            case FlushCache():
                if not (await self.manager.flush_cache()).success:
                    raise Overloaded("the prefix cache is in use")
                return Done()
            case _:
                raise EngineRefused(f"this engine knows no {type(request).__name__}")

    # The link --------------------------------------------------------------------------

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self._flush()

    def _flush(self) -> None:
        while data := self.peer.data_to_send():
            self.writer.write(data)


def _last_line(error: Exception) -> str:
    """Write the whole of an unforeseen error into the engine's log, and return its last line."""
    traceback.print_exception(error, file=sys.stderr)
    return "".join(traceback.format_exception_only(error)).strip()


def run(boot: boot_message.BootMessage, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Run the engine that `boot` describes and serve `link`, until the node or the watchdog ends it."""
    folder = Path(boot.folder)
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    os.environ.update(boot.environment)
    if (delay_s := boot.environment.get(transfer_delay.VARIABLE)) is not None:
        transfer_delay.delay_transfers(float(delay_s))
    rank = boot.arguments.get("node_rank")
    if isinstance(rank, int) and boot.arguments.get("device") == "cpu":
        pin_to_core(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    _hook_ports(folder)
    try:
        listener = outputs.listen(folder)
        engine = _Engine(**boot.arguments)
        _require_plugin()
        for pid in engine.get_all_child_pids():
            watchdog.watch_child(pid)
        shared_memory.record(folder, shared_memory.mapped())
        peer = Peer(boot.name, serves_max=engine.server_args.max_running_requests + CONTROL_STREAMS)
        host = None if rank else Host(engine, _info(engine), peer, link, watchdog)
        if host is not None:
            engine.loop.run_until_complete(host.start(listener))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # of any kind: it is the reason why this engine did not start
        peer = Peer(boot.name, serves_max=0)
        peer.send(Bye(boot_message.START_FAILED, f"{type(error).__name__}: {error}"))
        link.sendall(peer.data_to_send())
        watchdog.end(f"the engine could not start: {error!r}")
    reason = serve_follower_rank(peer, link, watchdog) if host is None else engine.loop.run_until_complete(host.serve())
    print_reason(reason)
    watchdog.unwatch_children()
    engine.shutdown()
    shared_memory.remove(folder)
    os._exit(0)


def _require_plugin() -> None:
    """Raise `RuntimeError` if SGLang serves without the limits of grammars: it only logs why it loads no plugin."""
    if not import_module("espalier_sglang").active:
        raise RuntimeError("SGLang has not loaded the limits of grammars")


def _info(engine: _Engine) -> EngineInfo:
    return translation.engine_info(engine, model_files.model_digest(Path(engine.server_args.model_path)))
