"""The data of a load: the server, the task of a worker process, and the record of each request.

A worker and its parent exchange them as lines of JSON over the worker's standard streams.
"""

from __future__ import annotations

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


@frozen(kw_only=True)
class Target:
    """The server, its API and model, and the options of every request."""

    url: str
    api: Api
    model: str
    key: str | None = None
    ignore_eos: bool = False
    extra: str = "{}"  # a JSON object of more fields for every request's body
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
    connections: int
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
