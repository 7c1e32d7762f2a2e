"""The tokens of SGLang's scheduler on their way to the host, without fields that the host does not read.

SGLang sends its detokenizer some forty lists a step, and in one of them an object a request, with the times of its
stages: to pickle and unpickle it takes longer than all other work of the host for a token. Its server in Rust does
without, and SGLang has an attribute for that server's own sender: here it is a sender of ours. A step arrives as flat
lists over a Unix socket in the host's folder, is read by one system call in one callback of the event loop, and is
handed on in the same turn. Over ZeroMQ the same bytes wake a thread at either end, and with zmq.asyncio they pass three
futures. SGLang's other answers (aborts, loads, flushed caches) go their own way. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Generic, NamedTuple, Required, TypedDict, TypeVar

from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_serving

from protocol.weight_versions import VERSION_CHARACTERS_MAX

SOCKET_NAME = "steps"
READ_BYTES = 256 * 1024
_HEAD = struct.Struct("<I")  # the length of a step's pickle, before it
StepT = TypeVar("StepT")


class Likeliest(NamedTuple):
    """The log probabilities of a request's tokens in a step, and the likeliest ids at each with theirs."""

    values: list[float]
    top_ids: list[list[int]]
    top_values: list[list[float]]


class Scored(NamedTuple):
    """The log probabilities of a prompt's tokens behind the first, and the likeliest ids in each place with theirs.

    They are packed arrays in the machine's own order, `likeliest` a row in the latter two.
    """

    likeliest: int
    logprobs: bytes  # float32
    top_ids: bytes  # int32
    top_logprobs: bytes  # float32


class EngineFinishReason(TypedDict, total=False):
    """A finish reason of SGLang's; `status_code` and `message` belong to an abort."""

    type: Required[str]
    matched: str | int | None
    message: str | None
    status_code: int | None


class Finish(NamedTuple):
    """The end of a request, as SGLang reports it."""

    reason: EngineFinishReason
    prompt_tokens: int


class StepOutput(NamedTuple):
    """The tokens of one step: request `ids[i]` gets the next `counts[i]` of `tokens`.

    `finished`, `logprobs` and `scored` are by the request's index in `ids`. `version` is that of the weights.
    """

    ids: list[str]
    counts: list[int]
    tokens: list[int]
    cached_tokens: list[int]
    finished: dict[int, Finish]
    logprobs: dict[int, Likeliest]
    scored: dict[int, Scored]
    version: str = ""


def send_steps() -> None:
    """Make the scheduler of this process send its tokens as `StepOutput`; to be called once."""
    initialize = SchedulerOutputStreamer.__post_init__

    def initialized(self: SchedulerOutputStreamer) -> None:
        initialize(self)
        self.rust_server = StepSender(self.send_to_detokenizer, lambda: get_serving().weight_version)

    SchedulerOutputStreamer.__post_init__ = initialized


class StepSender:
    """The receiver of each step's tokens in the scheduler, instead of SGLang's server in Rust.

    Only the rank that has SGLang's own socket sends. `version` returns that of the weights.
    """

    def __init__(self, sender: SenderWrapper, version: Callable[[], str]) -> None:
        self._version = version
        self._socket: socket.socket | None = None
        if sender.socket is not None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(_path(Path(tempfile.gettempdir())))

    def push_generation(self, output: BatchTokenIDOutput, _decode_latencies: dict[int, float]) -> None:
        """Send the tokens of one step."""
        if self._socket is not None:
            self.send(step_output(output, self.version))

    @property
    def version(self) -> str:
        """The version of the weights."""
        return self._version()

    def send(self, step: object) -> None:
        """Send what a step has computed, and wait while the host is far behind."""
        if self._socket is not None:
            data = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
            self._socket.sendall(_HEAD.pack(len(data)) + data)


def step_output(output: BatchTokenIDOutput, version: str) -> StepOutput:
    """Return the fields of SGLang's output that the host reads, and the version of the weights."""
    reasons = output.finished_reasons
    return StepOutput(
        ids=output.rids,
        counts=list(map(len, output.output_ids)),
        tokens=list(chain.from_iterable(output.output_ids)),
        cached_tokens=output.cached_tokens,
        finished={i: Finish(reason, output.prompt_tokens[i]) for i, reason in enumerate(reasons) if reason is not None},
        logprobs={
            i: Likeliest(values, output.output_top_logprobs_idx[i], output.output_top_logprobs_val[i])
            for i, values in enumerate(output.output_token_logprobs_val or ())
            if values
        },
        scored={
            i: _scored(values, output.input_top_logprobs_idx[i], output.input_top_logprobs_val[i])
            for i, values in enumerate(output.input_token_logprobs_val or ())
            if values
        },
        version=version[:VERSION_CHARACTERS_MAX],
    )


def _scored(values: list[float], top_ids: list[list[int]] | None, top_values: list[list[float]] | None) -> Scored:
    """Return the scores of a prompt without those of its first token, for which SGLang has None."""
    top_ids, top_values = (top_ids or [])[1:], (top_values or [])[1:]
    return Scored(
        len(top_ids[0]) if top_ids else 0,
        array("f", values[1:]).tobytes(),
        array("i", chain.from_iterable(top_ids)).tobytes(),
        array("f", chain.from_iterable(top_values)).tobytes(),
    )


def listen(folder: Path) -> socket.socket:
    """Return a socket at which the schedulers of the host with this folder find it, even before it accepts."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_path(folder))
    listener.listen()
    listener.setblocking(False)
    return listener


def _path(folder: Path) -> str:
    return str(folder / SOCKET_NAME)


class StepReceiver(Generic[StepT]):
    """Receives the steps of all schedulers; `end` gets the reason when one cannot be handled."""

    def __init__(self, listener: socket.socket, on_step: Callable[[StepT], None], end: Callable[[str], object]) -> None:
        self._listener = listener
        self._on_step = on_step
        self._end = end

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive from now on, in this loop."""
        self._loop = loop
        loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._loop.add_reader(connection, self._receive, connection, bytearray())

    def _receive(self, connection: socket.socket, buffer: bytearray) -> None:
        failure: OSError | None = None
        try:
            data = connection.recv(READ_BYTES)
        except BlockingIOError:  # nothing is there after all
            return
        except OSError as error:
            data, failure = b"", error
        if not data:
            self._loop.remove_reader(connection)  # the scheduler has ended, which the watchdog notices as well
            connection.close()
            if failure is not None:  # it may run on, and requests would wait for ever
                self._end(f"outputs of the scheduler could not be read: {failure!r}")
            return
        buffer += data
        try:
            begin = 0
            while len(buffer) - begin >= _HEAD.size:
                end = begin + _HEAD.size + _HEAD.unpack_from(buffer, begin)[0]
                if end > len(buffer):
                    break
                step = pickle.loads(memoryview(buffer)[begin + _HEAD.size : end])  # noqa: S301  # from our scheduler
                self._on_step(step)
                begin = end
            del buffer[:begin]
        except Exception as error:  # noqa: BLE001  # any error: requests would wait for ever
            traceback.print_exception(error, file=sys.stderr)
            self._end(f"an output of the scheduler could not be handled: {error!r}")
