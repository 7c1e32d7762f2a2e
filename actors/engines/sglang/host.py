"""The engine's host: one SGLang engine in a process of its own, answering its node over a link.

It speaks the frames of any link, with the same state table, over a Unix socket. The scheduler keeps its tokenizer
(grammars and `min_new_tokens` need it), but no detokeniser runs: its token ids come straight here, and each engine step
becomes one frame. Written for SGLang 0.5.23; whatever is private to it is touched in this file alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from attrs import define
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import BatchTokenIDOutput, GenerateReqInput
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.server_args import PortArgs
from sglang.version import __version__

from actors.engines.sglang import hold, leftovers, settings
from actors.engines.sglang.guard import Guard, say_why
from actors.engines.sglang.rank import accompany, bind_to_a_core
from protocol import codec
from protocol.codec import Message
from protocol.errors import EngineRefused, HandOffFailed, Internal, Left, Overloaded, PeerViolation, RequestError
from protocol.frames import Begun, Bye, Cancel, End, Ended, Fail, Frame, Open, Step
from protocol.messages import (
    Done,
    EngineInfo,
    EngineLoad,
    FinishReason,
    FlushCache,
    Generate,
    GetInfo,
    GetLoad,
    GrammarKind,
    HandOff,
    Logprob,
    Rendezvous,
)
from protocol.peer import Peer
from protocol.trace import as_headers

READ_BYTES = 256 * 1024
HAND_OFF = ("KVTransferError", "transfer failed", "bootstrap")  # SGLang's words where a pair did not find together
KEPT = 6  # tokens; SGLang: `max_req_input_len`
CONTROL_STREAMS = 16  # beside one stream a slot


class _Engine(Engine):
    """SGLang's engine without its detokeniser process."""

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: object) -> tuple[list[object], list[str]]:
        return [], []


def _hook_ports(folder: Path) -> None:
    """Send the scheduler's output to the tokenizer manager, and note what the engine will leave in /dev/shm."""
    init_new = PortArgs.init_new

    def hooked(*args: object, **kwargs: object) -> PortArgs:
        ports = init_new(*args, **kwargs)
        ports.detokenizer_ipc_name = ports.tokenizer_ipc_name
        leftovers.record(folder, {Path(shm_path_for(ports.instance_id)).name})
        return ports

    PortArgs.init_new = staticmethod(hooked)


@define(eq=False)
class _Running:
    """One request inside the engine."""

    id: str
    stream: int
    logprobs: int | None = None  # how many of the likeliest tokens to tell of
    task: asyncio.Task[None] | None = None
    begun: bool = False


class Host:
    """Serves one link from one engine."""

    def __init__(self, engine: _Engine, peer: Peer, link: socket.socket, guard: Guard) -> None:
        self.engine = engine
        self.manager = engine.tokenizer_manager
        self.peer = peer
        self.link = link
        self.guard = guard
        self.running: dict[str, _Running] = {}
        self.streams: dict[int, _Running] = {}
        self.controls: set[asyncio.Task[None]] = set()
        self._handle_other_output = self.manager._handle_batch_output  # noqa: SLF001

    async def serve(self) -> str:
        """Answer the node until it says Bye, and return its reason."""
        loop = asyncio.get_running_loop()
        self.manager.auto_create_handle_loop()
        self.manager._handle_batch_output = self._stepped  # noqa: SLF001
        # SGLang has just installed handlers that drain for seconds, and a watchdog that polls; the guard does better.
        for sign in (signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(sign, self.guard.end, sign.name)
        if self.manager._subprocess_watchdog is not None:  # noqa: SLF001
            self.manager._subprocess_watchdog.stop()  # noqa: SLF001
        reader, self.writer = await asyncio.open_connection(sock=self.link)
        self._flush()  # Hello: this engine is ready
        while data := await reader.read(READ_BYTES):
            try:
                for frame in self.peer.receive(data):
                    if isinstance(frame, Bye):
                        return frame.detail
                    self._received(frame)
                self._flush()  # what the peer itself has to say
            except PeerViolation as error:
                self._send(Bye("peer_violation", str(error)))
                raise
        return self.guard.end("the link to the node is closed")

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                request = codec.decode(frame.body)
                if isinstance(request, Generate):
                    self._start(_Running(request.id, frame.stream, request.logprobs), request)
                else:
                    task = asyncio.get_running_loop().create_task(self._control(frame.stream, request))
                    self.controls.add(task)
                    task.add_done_callback(self.controls.discard)
            case Cancel():
                if (running := self.streams.get(frame.stream)) is not None:
                    self._abort(running)
            case _:
                pass

    # One request -----------------------------------------------------------------------

    def _start(self, running: _Running, request: Generate) -> None:
        self.running[running.id] = self.streams[running.stream] = running
        running.task = asyncio.get_running_loop().create_task(self._generate(running, request))

    async def _generate(self, running: _Running, request: Generate) -> None:
        """Drive SGLang's own bookkeeping of one request; its tokens and its end come through `_stepped`."""
        last = None
        traced = request.trace if self.manager.enable_trace else None
        try:
            asked = GenerateReqInput(
                input_ids=request.tokens,
                sampling_params=self._sampling(request),
                rid=request.id,
                stream=True,
                return_logprob=request.logprobs is not None,
                top_logprobs_num=request.logprobs or 0,
                cache_salt=request.cache_salt,
                external_trace_header=None if traced is None else as_headers(traced),
                **_meeting(request.rendezvous),
            )
            async for out in self.manager.generate_request(asked, None):
                last = out
        except (ValueError, TypeError, OverflowError) as error:  # SGLang's own checks
            self._fail(running, EngineRefused(str(error)))
        except Exception as error:
            self._fail(running, Internal(f"the engine failed the request: {type(error).__name__}"))
            raise
        else:
            if running.id in self.running:  # ended outside a step: refused or aborted while it waited
                self._fail(running, _failure(last["meta_info"]["finish_reason"] if last else {}))

    def _abort(self, running: _Running) -> None:
        """Stop a request at whatever point it has reached."""
        state = self.manager.rid_to_state.get(running.id)
        if state is not None and state.dispatched:
            self.manager.abort_request(running.id)  # the scheduler answers with the end
        elif running.task is not None:  # the scheduler has not heard of it, so SGLang holds nothing for it
            running.task.cancel()
            self._fail(running, Left("the asker left"))

    def _sampling(self, request: Generate) -> dict[str, object]:
        wanted = request.sampling
        return {
            "max_new_tokens": wanted.tokens_max,
            "min_new_tokens": wanted.tokens_min,
            "temperature": wanted.temperature,
            "top_p": wanted.top_p,
            "top_k": wanted.top_k,
            "min_p": wanted.min_p,
            "frequency_penalty": wanted.frequency_penalty,
            "presence_penalty": wanted.presence_penalty,
            "repetition_penalty": wanted.repetition_penalty,
            "stop_token_ids": list(wanted.stop_token_ids) or None,
            "ignore_eos": wanted.ignore_eos,
            "sampling_seed": wanted.seed if self._honours_seed else None,
            "logit_bias": {str(token): bias for token, bias in wanted.logit_bias.items()} or None,
            # SGLang has a field of this name for each kind of grammar
            **({} if wanted.grammar is None else {wanted.grammar.kind.value: wanted.grammar.text}),
        }

    async def _stepped(self, out: object) -> None:
        """Turn one engine step into one frame; runs in place of SGLang's handler, for every output it sends."""
        if not isinstance(out, BatchTokenIDOutput):
            await self._handle_other_output(out)
            return
        step = Step([], [], [], [], [])
        failed: list[tuple[_Running, RequestError]] = []
        for i, rid in enumerate(out.rids):
            running = self.running.get(rid)
            if running is None:
                continue
            reason = out.finished_reasons[i]
            if reason is not None and reason["type"] == "abort":
                failed.append((running, _failure(reason)))  # its tokens are garbage where the scheduler found an error
                self._forget(running, reason)
                continue
            if not running.begun:
                running.begun = True
                step.begun.append(Begun(running.stream, out.cached_tokens[i]))
            ids = out.output_ids[i]
            if running.logprobs is not None:
                step.logprobs[running.stream] = _logprobs(out, i, running.logprobs)
            step.streams.append(running.stream)
            step.counts.append(len(ids))
            step.tokens.extend(ids)
            if reason is not None:
                step.ended.append(
                    Ended(
                        running.stream,
                        FinishReason(reason["type"]),
                        out.prompt_tokens[i],
                        out.completion_tokens[i],
                        out.cached_tokens[i],
                        reason.get("matched"),
                    )
                )
                self._forget(running, reason)
        if step.streams:
            self.peer.send(step)
        for running, error in failed:
            self.peer.send(Fail(running.stream, error.code, error.detail))
        self._flush()

    def _forget(self, running: _Running, reason: dict[str, object]) -> None:
        """End a request in our books and in SGLang's, as its own handler would have."""
        del self.running[running.id], self.streams[running.stream]
        state = self.manager.rid_to_state.pop(running.id, None)
        if state is not None:
            state.finished = True
            if self.manager.enable_trace:
                state.time_stats.set_finished_time()  # its span is exported once it has ended
            self.manager._release_lora_once(state)  # noqa: SLF001
            state.out_list.append({"output_ids": [], "meta_info": {"id": running.id, "finish_reason": reason}})
            state.event.set()

    def _fail(self, running: _Running, error: RequestError) -> None:
        if self.running.pop(running.id, None) is not None:
            del self.streams[running.stream]
            self._send(Fail(running.stream, error.code, error.detail))

    # Control operations ----------------------------------------------------------------

    async def _control(self, stream: int, request: Message) -> None:
        try:
            self._send(End(stream, codec.encode(await self._controlled(request))))
        except RequestError as error:
            self._send(Fail(stream, error.code, error.detail))
        except Exception as error:
            self._send(Fail(stream, Internal.code, f"{type(request).__name__} failed: {type(error).__name__}"))
            raise

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return self.info()
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

    def info(self) -> EngineInfo:
        """Return what this engine is."""
        arguments = self.engine.server_args
        scheduler = self.engine._scheduler_init_result.scheduler_infos[0]  # noqa: SLF001
        context_max, kv_tokens_max = self.manager.context_len, scheduler["max_total_num_tokens"]
        mode = arguments.disaggregation_mode
        return EngineInfo(
            kind="sglang",
            version=__version__,
            vocabulary_size=self.manager.model_config.vocab_size,
            context_max=context_max,
            kv_tokens_max=kv_tokens_max,
            # SGLang keeps a page of the KV memory for itself, and refuses prompts of the last `KEPT` tokens of either
            # limit, however little is asked for; what passes the limits otherwise it cuts short without a word.
            request_tokens_max=min(context_max - KEPT, kv_tokens_max - max(arguments.page_size, KEPT)),
            running_max=arguments.max_running_requests,
            page_size=arguments.page_size,
            honours_seed=self._honours_seed,
            grammars=() if arguments.grammar_backend == "none" else tuple(GrammarKind),
            hand_off=HandOff.NONE if mode == "null" else HandOff.RENDEZVOUS,
            bootstrap=(arguments.host, arguments.disaggregation_bootstrap_port) if mode == "prefill" else None,
            ranks=arguments.tp_size * arguments.pp_size,
        )

    @property
    def _honours_seed(self) -> bool:
        return bool(self.engine.server_args.enable_deterministic_inference)

    # The wire --------------------------------------------------------------------------

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self._flush()

    def _flush(self) -> None:
        while data := self.peer.take():
            self.writer.write(data)


def _meeting(rendezvous: Rendezvous | None) -> dict[str, object]:
    """Return where SGLang's two engines of a pair find each other."""
    if rendezvous is None:
        return {}
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    return {"bootstrap_host": host, "bootstrap_port": rendezvous.port, "bootstrap_room": rendezvous.room}


def _logprobs(out: BatchTokenIDOutput, i: int, top: int) -> tuple[Logprob, ...]:
    """Return what SGLang says of the tokens that request `i` of a step got."""
    values = out.output_token_logprobs_val[i]
    if not top:
        return tuple(map(Logprob, values))
    tops = zip(out.output_top_logprobs_idx[i], out.output_top_logprobs_val[i], strict=True)
    likeliest = (tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in tops)
    return tuple(map(Logprob, values, likeliest))


def _failure(reason: dict[str, object]) -> RequestError:
    """Return what an abort means: the scheduler's word for whatever did not end well."""
    status, detail = reason.get("status_code"), str(reason.get("message") or "aborted")
    if not isinstance(status, int):  # nobody's error: the asker left
        return Left(detail)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Overloaded(detail)
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return EngineRefused(detail)
    return HandOffFailed(detail) if any(word in detail for word in HAND_OFF) else Internal(detail)


def run(boot: settings.Boot, link: socket.socket, guard: Guard) -> NoReturn:
    """Become the engine that `boot` describes, at the end `link`, for as long as its guard lets it live."""
    folder = Path(boot.folder)
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    os.environ.update(boot.environment)
    if (held_s := boot.environment.get(hold.VARIABLE)) is not None:
        hold.hold_transfers(float(held_s))
    rank = boot.arguments.get("node_rank")
    if isinstance(rank, int) and boot.arguments.get("device") == "cpu":
        bind_to_a_core(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the node's to judge
    _hook_ports(folder)
    try:
        engine = _Engine(**boot.arguments)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is why this engine did not start
        peer = Peer(boot.name, serves_max=0)
        peer.send(Bye(settings.START_FAILED, f"{type(error).__name__}: {error}"))
        link.sendall(peer.take())
        guard.end(f"the engine could not start: {error!r}")
    for pid in engine.get_all_child_pids():
        guard.watch_child(pid)
    leftovers.record(folder, leftovers.mapped())
    peer = Peer(boot.name, serves_max=engine.server_args.max_running_requests + CONTROL_STREAMS)
    if rank:
        why = accompany(peer, link, guard)
    else:
        why = engine.loop.run_until_complete(Host(engine, peer, link, guard).serve())
    say_why(why)
    guard.release_children()
    engine.shutdown()
    leftovers.remove(folder)
    os._exit(0)
