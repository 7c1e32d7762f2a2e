"""The grammar checker: a process that compiles and walks each grammar in a fork of its own, to be killed at a limit.

A grammar of a few bytes may take minutes to compile, or gigabytes, and a compiler cannot be interrupted: only a process
can be ended. The checker builds SGLang's own grammar backend from its engine's arguments, so both compile the same. It
answers its node over a link, as an engine's host does; a cancelled stream ends its fork. The checker may keep nothing
of a grammar: the text is the client's, and is neither logged nor stored. Written for SGLang 0.5.23 and xgrammar 0.2.7.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import re
import resource
import selectors
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np
import torch
from attrs import define, field
from setproctitle import setproctitle
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from xgrammar import GrammarCompiler, allocate_token_bitmask

from actors.engines import leftover_memory
from actors.engines.host.failed_start import fail_start
from actors.engines.host.link_messages import LinkMessages
from actors.engines.host.watchdog import Watchdog, print_reason
from actors.engines.sglang import boot_message
from actors.engines.sglang.host.grammars.grammar_walk import SortedTokenIds, Walk
from actors.engines.sglang.spec import GrammarLimits, Setting
from protocol.errors import AskerLeft, EngineRefused, LocalViolation, Overloaded, PeerViolation, RequestError
from protocol.link.frames import Bye, Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.generation import GrammarKind
from protocol.messages.grammars import WORDS
from protocol.messages.operations import CheckGrammar, GrammarChecked

READ_BYTES = 256 * 1024
STREAMS_BESIDE = 4  # streams of cancelled checks that are not over yet
SLOWDOWN_MAX = 20.0  # elapsed time over processor time of a check, on a busy machine
SLOWDOWN_GRACE_S = 5.0
NICE = 10  # the priority of checks: engines go first
PR_SET_PDEATHSIG = 1
SOURCE_LOCATION = re.compile(r"^\[[0-9:]+\] \S+?:\d+: ")  # the beginning of each error of xgrammar
SGLANG_NAMES = {GrammarKind.JSON_SCHEMA: "json"}  # SGLang's names of kinds, where they differ

Report: TypeAlias = dict[str, float | str]


@define(eq=False)
class _State:
    """An xgrammar matcher, and the mask of the tokens that may be next."""

    grammar: XGrammarGrammar
    stops: list[int]  # ids that end an answer
    mask: torch.Tensor

    @property
    def ended(self) -> bool:
        return bool(self.grammar.is_terminated())

    def accept(self, token: int) -> None:
        self.grammar.matcher.accept_token(token)

    def fill(self) -> None:
        self.grammar.fill_vocab_mask(self.mask, 0)

    def ids(self) -> SortedTokenIds:
        bits = np.unpackbits(self.mask.numpy().view(np.uint8).ravel(), bitorder="little")
        ids = np.flatnonzero(bits[: self.grammar.vocab_size])
        allowed: SortedTokenIds = ids[~np.isin(ids, self.stops)]
        return allowed

    def fork(self) -> _State:
        own = self.grammar
        forked = XGrammarGrammar(own.matcher.fork(), own.vocab_size, own.ctx, own.override_stop_tokens)
        return _State(forked, self.stops, self.mask)


@define(eq=False)
class _Check:
    """One check and its fork; `report` is the fork's output, a JSON object a line."""

    stream: int
    kind: GrammarKind
    pid: int
    cancelled: bool = False
    report: bytes = b""


@define(eq=False)
class CheckServer:
    """Serves one link: each check in a fork of this process."""

    backend: XGrammarGrammarBackend
    limits: GrammarLimits
    peer: Peer
    link: socket.socket
    _selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector)
    _checks: dict[int, _Check] = field(factory=dict)  # checks by stream
    _messages: LinkMessages = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._messages = LinkMessages(self.peer)

    def serve(self) -> str:
        """Answer the node until its Bye, and return the reason in it."""
        self._selector.register(self.link, selectors.EVENT_READ)
        self._flush()  # Hello: the checker is ready
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._on_report(key.fd, key.data)
                    continue
                data = self.link.recv(READ_BYTES)
                if not data:
                    return "the link to the node is closed"
                try:
                    for frame in self.peer.receive_data(data):
                        if isinstance(frame, Bye):
                            return frame.detail
                        self._received(frame)
                except (PeerViolation, LocalViolation) as error:
                    self._send(Bye("peer_violation" if isinstance(error, PeerViolation) else "internal", str(error)))
                    raise
                self._flush()

    def _received(self, frame: Frame) -> None:
        if isinstance(frame, Open):
            try:
                request = self._messages.request(frame)
                if not isinstance(request, CheckGrammar):
                    raise EngineRefused(f"this checks grammars, no {type(request).__name__}")
            except RequestError as error:
                self._messages.fail(frame.stream, error)
            else:
                self._begin(frame.stream, request)
        elif isinstance(frame, Cancel) and (check := self._checks.get(frame.stream)) is not None:
            check.cancelled = True
            os.kill(check.pid, signal.SIGKILL)

    def _begin(self, stream: int, request: CheckGrammar) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.link.close()
                self._selector.close()
                os.close(read)
                examine(self.backend, request, self.limits, write)
            finally:
                os._exit(1)
        os.close(write)
        check = self._checks[stream] = _Check(stream, request.grammar.kind, pid)
        self._selector.register(read, selectors.EVENT_READ, check)

    def _on_report(self, fd: int, check: _Check) -> None:
        if data := os.read(fd, READ_BYTES):
            check.report += data
            return
        self._selector.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(check.pid, 0)
        del self._checks[check.stream]
        if check.cancelled:
            self._messages.fail(check.stream, AskerLeft("the asker left"))
        elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            self._messages.fail(check.stream, Overloaded("the machine is too busy to check the grammar"))
        else:
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            self._messages.end(check.stream, verdict(check.kind, check.report, ended_by, self.limits))
        self._flush()

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self._flush()

    def _flush(self) -> None:
        while data := self.peer.data_to_send():
            self.link.sendall(data)


def verdict(kind: GrammarKind, written: bytes, ended_by: int, limits: GrammarLimits) -> GrammarChecked:
    """Return the result of a check, from its fork's report and the signal that ended the fork, 0 if none did."""
    report: Report = {}
    for line in written.decode().splitlines():
        report |= json.loads(line)
    compile_s, step_ms = float(report.get("compile_s", 0)), float(report.get("step_ms", 0))
    size = int(report.get("bytes", 0))
    if "mistake" in report:
        refusal = f"{WORDS[kind]} cannot be used: {report['mistake']}"
    elif ended_by == signal.SIGPROF and "compile_s" not in report:
        refusal = f"{WORDS[kind]} takes more than {limits.compile_s:g} s of a processor to compile; make it simpler"
    elif ended_by == signal.SIGPROF or report.get("kept") is False:
        refusal = (
            f"{WORDS[kind]} takes more than {limits.step_ms:g} ms of a processor for a single token;"
            " repeat or leave out less of what may itself be empty or repeated"
        )
    elif size > limits.bytes_max or "memory" in report:
        refusal = f"{WORDS[kind]} needs more than {limits.bytes_max / 2**20:g} MiB of memory; make it simpler"
    elif ended_by or "kept" not in report:
        refusal = f"{WORDS[kind]} ends whatever compiles it; make it simpler"
    else:
        refusal = ""
    return GrammarChecked(refusal, compile_s, step_ms, size)


# In the fork ---------------------------------------------------------------------------


def examine(backend: XGrammarGrammarBackend, request: CheckGrammar, limits: GrammarLimits, out: int) -> None:
    """Compile and walk one grammar, report each to `out`, and end this process."""

    def report(**found: float | str) -> None:
        os.write(out, json.dumps(found).encode() + b"\n")

    _confine(limits)
    logging.disable(logging.CRITICAL)  # SGLang would log the grammar, which is the client's
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)  # its signal ends a process that has no handler for it
    try:
        kind, text = request.grammar.kind, request.grammar.text
        grammar = backend._init_value_dispatch((SGLANG_NAMES.get(kind, kind.value), text), False)  # noqa: SLF001
        if isinstance(grammar, InvalidGrammarObject):
            message = grammar.error_message
            report(
                **({"memory": 1.0} if "bad_alloc" in message else {"mistake": SOURCE_LOCATION.sub("", message).strip()})
            )
        else:
            report(compile_s=time.process_time(), bytes=grammar.ctx.memory_size_bytes)
            signal.setitimer(signal.ITIMER_PROF, 2 * limits.walk_s + 10 * limits.step_ms / 1000)
            if _allows_nothing(grammar):
                report(mistake="there is no text that it allows")
            else:
                walked = _walk(grammar, text, limits).run()
                report(kept=walked.kept, step_ms=walked.longest_s * 1000)
    except (MemoryError, RuntimeError) as error:  # xgrammar raises RuntimeError for everything
        if not isinstance(error, MemoryError) and "bad_alloc" not in str(error):
            raise
        report(memory=1)
    os._exit(0)


def _confine(limits: GrammarLimits) -> None:
    """Limit this process: its memory, its elapsed time and its priority; let signals end it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    within_s = SLOWDOWN_GRACE_S + SLOWDOWN_MAX * (limits.compile_s + limits.walk_s)
    signal.setitimer(signal.ITIMER_REAL, within_s)
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (own + limits.bytes_max, own + limits.bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _allows_nothing(grammar: XGrammarGrammar) -> bool:
    """Return whether a grammar allows no first token, not even the end."""
    mask = allocate_token_bitmask(1, grammar.vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    return not bool(mask.any())


def _walk(grammar: XGrammarGrammar, text: str, limits: GrammarLimits) -> Walk:
    info = grammar.ctx.tokenizer_info
    stops = sorted({*grammar.matcher.stop_token_ids, *info.special_token_ids})
    lengths = info.decoded_vocab
    return Walk(
        start=_State(grammar, stops, allocate_token_bitmask(1, grammar.vocab_size)),
        clock=time.thread_time,
        rng=random.Random(text),  # noqa: S311  # the same walk each time; it is no secret
        token_bytes=lambda token: len(lengths[token]),
        step_s=limits.step_ms / 1000,
        within_s=limits.walk_s,
    )


# The process ---------------------------------------------------------------------------


def grammar_backend(arguments: dict[str, Setting]) -> XGrammarGrammarBackend:
    """Return the grammar backend of an engine with these arguments, as its scheduler would make it."""
    args = ServerArgs(**arguments)
    args.resolve_once()
    resolved = args.resolved_dict()
    model = ModelConfig.from_server_args(args)
    tokenizer = get_tokenizer(
        resolved["tokenizer_path"],
        tokenizer_mode=resolved["tokenizer_mode"],
        trust_remote_code=resolved["trust_remote_code"],
        revision=resolved["revision"],
        tokenizer_backend=resolved["tokenizer_backend"],
    )
    backend = XGrammarGrammarBackend(
        tokenizer,
        vocab_size=model.vocab_size,
        model_eos_token_ids=list(model.hf_eos_token_id) if model.hf_eos_token_id else None,
        any_whitespace=not resolved["constrained_json_disable_any_whitespace"],
        max_whitespace_cnt=resolved["constrained_json_max_whitespace_cnt"],
    )
    # In one thread, so that all its time is this process's; nothing is kept, because each check has a fork of its own.
    info = backend._tokenizer_info  # noqa: SLF001
    backend.grammar_compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return backend


def run(boot: boot_message.BootMessage, link: socket.socket, watchdog: Watchdog) -> NoReturn:
    """Check grammars for engines like the one that `boot` describes, as long as the watchdog lets this process live."""
    assert boot.checks is not None
    setproctitle("espalier::grammars")
    tempfile.tempdir = os.environ["TMPDIR"] = boot.folder
    os.environ.update(boot.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the node to handle
    try:
        backend = grammar_backend(boot.arguments)
    except Exception as error:  # noqa: BLE001  # any error is the reason of the failed start
        fail_start(boot.name, link, watchdog, error, "grammars cannot be checked")
    peer = Peer(boot.name, serves_max=boot.checks.checks_max + STREAMS_BESIDE)
    print_reason(CheckServer(backend, boot.checks, peer, link).serve())
    leftover_memory.remove(Path(boot.folder))
    os.killpg(0, signal.SIGKILL)  # and its forks with it
    raise AssertionError("no process survives SIGKILL")
