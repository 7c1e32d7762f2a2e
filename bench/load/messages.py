"""The data of a load: the server, the task of a worker process, and the record of each request.

A worker and its parent exchange them as lines of JSON over the worker's standard streams.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from typing import Literal

import msgspec
import trio
from attrs import define, field, frozen

from bench.load.plan import Pace, Workload

Api = Literal["responses-ws", "responses", "chat", "completions"]
Kind = Literal["connection", "http", "error_event", "truncated", "shape", "timeout"]

PATHS: dict[Api, str] = {
    "responses-ws": "responses",
    "responses": "responses",
    "chat": "chat/completions",
    "completions": "completions",
}
READ_BYTES_MAX = 1 << 20
CODE_LENGTH_MAX = 80
DETAIL_LENGTH_MAX = 300


@frozen(kw_only=True)
class Target:
    """The server, its API and model, and the options of every request."""

    url: str
    api: Api
    model: str
    key: str | None = None
    ignore_eos: bool = False
    timeout_s: float = 600.0  # of one request, from before it connects to its end
    reuse: bool = True  # a connection serves many requests


@frozen(kw_only=True)
class Job:
    """The task of one worker."""

    target: Target
    workload: Workload
    pace: Pace
    worker: int = 0
    workers: int = 1


@frozen
class Fault:
    """Why a request failed: a kind, a code within it, and a detail such as the server's message."""

    kind: Kind
    code: str
    detail: str = ""


class RequestFailed(Exception):
    """One request has failed; its record gets the fault."""

    def __init__(self, kind: Kind, code: object, detail: object = "") -> None:
        super().__init__(f"{kind}: {code}: {detail}")
        self.fault = Fault(kind, _text(code, CODE_LENGTH_MAX), _text(detail, DETAIL_LENGTH_MAX))


def os_error_fault(error: BaseException, *, begun: bool) -> RequestFailed:
    """Return the failure that an error of a socket means: an answer that has `begun` is truncated."""
    return RequestFailed("truncated" if begun else "connection", name(error), error)


def name(error: BaseException) -> str:
    """Return a short name for an error of a socket: that of its first cause."""
    if isinstance(error, BaseExceptionGroup):
        return name(error.exceptions[0])
    if error.__cause__ is not None:
        return name(error.__cause__)
    if isinstance(error, socket.gaierror):
        return "no such host"
    number = getattr(error, "errno", None)
    return errno.errorcode.get(number, type(error).__name__) if isinstance(number, int) else type(error).__name__


def _text(value: object, length_max: int) -> str:
    text = str(value)
    return text if len(text) <= length_max else text[: length_max - 1] + "…"


@frozen
class Ready:
    """The warm-up is over. The parent answers with the time of `time.perf_counter` at which the load begins."""

    faults: tuple[Fault, ...] = ()


@frozen(kw_only=True)
class Record:
    """The record of one request; times in seconds, `sent_s` after the start, the others after `sent_s`."""

    number: int
    sent_s: float
    ended_s: float
    stamps: bytes = b""  # when each event with content came: an array of doubles
    connect_s: float | None = None  # None for a kept connection
    finish: str | None = None
    fault: Fault | None = None
    prompt_tokens: int | None = None  # as counted by the server
    output_tokens: int | None = None
    cached_tokens: int | None = None


@frozen(kw_only=True)
class Done:
    """The last message of a worker: its records, and its own CPU time between start and end."""

    wall_s: float
    cpu_s: float
    records: tuple[Record, ...]


def encode(message: Job | Ready | Done | float) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


@define(eq=False)
class Lines:
    """Reads a stream line by line."""

    _stream: trio.abc.ReceiveStream
    _whole: deque[bytes] = field(factory=deque)
    _parts: list[bytes] = field(factory=list)  # of a line that has begun: together they may be megabytes

    async def next(self) -> bytes | None:
        """Return the next line, None at the end of the stream."""
        while not self._whole:
            if not (data := await self._stream.receive_some(READ_BYTES_MAX)):
                return None
            *ends, rest = bytes(data).split(b"\n")
            for end in ends:
                self._whole.append(b"".join([*self._parts, end]))
                self._parts.clear()
            self._parts.append(rest)
        return self._whole.popleft()
