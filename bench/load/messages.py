"""The messages to and from a worker: frames of a length, a kind and MessagePack, over its standard streams.

They do not depend on how the worker was started, so that it could also run on another machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal

import msgspec
from attrs import define, field, frozen

from bench.load.plan import Pace, Workload

Api = Literal["responses-ws", "responses", "chat", "completions"]
CancelBy = Literal["close", "event"]
Kind = Literal["connection", "http", "error_event", "truncated", "shape", "timeout"]
Ending = Literal["completed", "cancelled", "failed"]

PATHS: dict[Api, str] = {
    "responses-ws": "responses",
    "responses": "responses",
    "chat": "chat/completions",
    "completions": "completions",
}
FRAME_BYTES_MAX = 1 << 30
HEADER = struct.Struct("!IB")


@frozen(kw_only=True)
class Target:
    """The server, its API and model, and the options of every request."""

    url: str
    api: Api
    model: str
    key: str | None = None
    temperature: float | None = 0.0
    ignore_eos: bool = False
    running_usage: bool = False  # request the usage so far with every event
    extra: str = "{}"  # a JSON object of more fields for every request's body
    timeout_s: float = 600.0  # of one request, from before it connects to its end
    reuse: bool = True  # a connection serves many requests
    cancel_by: CancelBy = "close"


# To a worker ----------------------------------------------------------------------------


@frozen(kw_only=True)
class Job:
    """The task of one worker."""

    target: Target
    workload: Workload
    pace: Pace
    worker: int = 0
    workers: int = 1


@frozen
class Go:
    """Begin when the system-wide monotonic clock (`time.perf_counter`) shows `at_s`."""

    at_s: float


# From a worker --------------------------------------------------------------------------


@frozen
class Fault:
    """Why a request failed: a kind, a code within it, and a detail such as the server's message."""

    kind: Kind
    code: str
    detail: str = ""


@frozen
class Ready:
    """The warm-up is over."""

    sent: int
    faults: tuple[Fault, ...] = ()


@frozen
class Progress:
    """The counts of a worker since its start."""

    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0


@frozen(kw_only=True)
class Record:
    """The record of one request; times in seconds, `sent_s` after the start, the others after `sent_s`."""

    number: int  # of the request, or of its conversation
    ending: Ending
    sent_s: float
    ended_s: float
    stamps: bytes = b""  # when each event with content came: an array of doubles
    weights: bytes = b""  # the tokens of each event: an array of unsigned ints, empty if each had one
    planned_s: float | None = None
    lag_s: float | None = None  # delay of its task, in an open loop
    held_s: float | None = None  # delay by the limit on concurrency
    connect_s: float | None = None  # None for a kept connection
    finish: str | None = None
    fault: Fault | None = None
    prompt_tokens: int | None = None  # as counted by the server
    output_tokens: int | None = None
    cached_tokens: int | None = None
    wanted_tokens: int = 0
    leave_tokens: int | None = None  # after which its client was to disconnect
    cancel_s: float | None = None  # from `response.cancel` to the end of the response
    turn: int = 0  # of its conversation


@frozen
class Records:
    """Requests that have ended."""

    records: tuple[Record, ...]


@frozen(kw_only=True)
class Done:
    """The last message of a worker: its own CPU time, tokens and delays between start and end."""

    wall_s: float
    cpu_s: float
    tokens: int  # that it read, of all requests
    lags: bytes  # delay of its event loop after each sleep of 10 ms: an array of doubles, in seconds
    connections: int


Message = Job | Go | Ready | Progress | Records | Done
KINDS: tuple[type[Message], ...] = (Job, Go, Ready, Progress, Records, Done)
_DECODERS = tuple(msgspec.msgpack.Decoder(kind) for kind in KINDS)


def encode(message: Message) -> bytes:
    """Return a message as one frame."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body), KINDS.index(type(message))) + body


@define
class Frames:
    """Splits bytes into messages."""

    _buffer: bytearray = field(factory=bytearray)

    def feed(self, data: bytes | bytearray) -> Iterator[Message]:
        """Yield the messages that `data` completes; raises `ValueError` on an unknown kind or an excessive length."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            length, kind = HEADER.unpack_from(self._buffer)
            if kind >= len(KINDS) or length > FRAME_BYTES_MAX:
                raise ValueError(f"not a frame of a worker: kind {kind}, {length} bytes")
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[HEADER.size : end])
            del self._buffer[:end]
            yield _DECODERS[kind].decode(body)
