"""A host's end of its link in asyncio: frames in and out, the requests that fail, and the reason why the host ends.

A token passes through here in the turn in which its step has come, so nothing on its way may wait.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable

from attrs import define, field

from actors.engines.host.link_messages import LinkMessages
from actors.engines.host.watchdog import Watchdog
from actors.engines.shared_tensors import sharing_works
from protocol.errors import InternalError, LocalViolation, PeerViolation, RequestError
from protocol.link.frames import Bye, Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.kind import Message

READ_BYTES = 256 * 1024
FAILURES_MAX = 5  # a window
WINDOW_S = 60.0
REASON_LENGTH_MAX = 300  # characters


class FailureRate:
    """The rate of an engine's own failures: of requests neither aborted nor wrong.

    With over `FAILURES_MAX` in `WINDOW_S` the engine is at fault.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: deque[float] = deque()

    def record(self, error: str) -> str | None:
        """Record a failure by its error; return the reason to end the engine, or None."""
        now = self._now()
        self._times.append(now)
        while self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if len(self._times) <= FAILURES_MAX:
            return None
        return f"it failed {len(self._times)} requests within {WINDOW_S:g} s, the last by {error[:REASON_LENGTH_MAX]}"


@define(eq=False)
class ServedLink:
    """The link of one host; `on_frame` gets each frame at the moment at which the peer yields it."""

    link: socket.socket
    peer: Peer
    watchdog: Watchdog
    on_frame: Callable[[Frame], None]
    messages: LinkMessages = field(init=False)
    _failures: FailureRate = field(factory=lambda: FailureRate(time.monotonic))
    _failing: asyncio.Event = field(factory=asyncio.Event)
    _end_reason: str = ""
    _writer: asyncio.StreamWriter = field(init=False)
    _controls: set[asyncio.Task[None]] = field(factory=set)

    def __attrs_post_init__(self) -> None:
        self.messages = LinkMessages(self.peer, _call_later if sharing_works() else None)

    async def serve(self) -> str:
        """Carry the link until the node's Bye, or until requests have failed too often, and return the reason."""
        loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self.link)
        self.flush()  # Hello: this host is ready
        reading, failing = loop.create_task(self._read(reader)), loop.create_task(self._failing.wait())
        await asyncio.wait({reading, failing}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        self._send(Bye("failing", self._end_reason))
        await self._writer.drain()
        return self._end_reason

    async def _read(self, reader: asyncio.StreamReader) -> str:
        while data := await reader.read(READ_BYTES):
            try:
                for frame in self.peer.receive_data(data):
                    if isinstance(frame, Bye):
                        return frame.detail
                    if isinstance(frame, Cancel):
                        self.messages.taken(frame.stream)
                    self.on_frame(frame)
                self.flush()  # the state machine of the link may answer by itself
            except (PeerViolation, LocalViolation) as error:
                self._send(Bye("peer_violation" if isinstance(error, PeerViolation) else "internal", str(error)))
                raise
        return self.watchdog.end("the link to the node is closed")

    def request(self, frame: Open) -> Message | None:
        """Return the request of an `Open` while `on_frame` has it; None, and a failed stream, if it cannot be read."""
        try:
            return self.messages.request(frame)
        except RequestError as error:  # no fault of the engine, so it does not count among its failures
            traceback.print_exception(error, file=sys.stderr)
            self.messages.fail(frame.stream, error)
            return None

    def control(self, stream: int, request: Message, answer: Callable[[Message], Awaitable[Message]]) -> None:
        """Answer a request that is none of the engine's work, in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._control(stream, request, answer))
        self._controls.add(task)
        task.add_done_callback(self._controls.discard)

    async def _control(self, stream: int, request: Message, answer: Callable[[Message], Awaitable[Message]]) -> None:
        try:
            self.messages.end(stream, await answer(request))
        except RequestError as error:
            self.messages.fail(stream, error)
        except Exception as error:  # noqa: BLE001  # a fault of the engine, as with a request
            sentence = f"{type(request).__name__} failed: {type(error).__name__}"
            self.fail(stream, InternalError(sentence), last_line(error))
        self.flush()

    def fail(self, stream: int, error: RequestError, cause: str = "") -> None:
        """Fail a stream; if the engine fails too many in a while, end the host, with the `cause` of the last."""
        self.messages.fail(stream, error)
        if isinstance(error, InternalError):
            self.note_failure(cause or error.detail)

    def note_failure(self, cause: str) -> None:
        """Count a failure of the engine's own, and end the host if there were too many in a while."""
        if (reason := self._failures.record(cause)) is not None:
            self.end(reason)

    def end(self, reason: str) -> None:
        """End the host as one that fails; the first reason counts."""
        if not self._failing.is_set():
            self._end_reason = reason
            self._failing.set()

    def flush(self) -> None:
        """Write what is to be sent."""
        while data := self.peer.data_to_send():
            self._writer.write(data)

    def _send(self, frame: Frame) -> None:
        self.peer.send(frame)
        self.flush()


def _call_later(delay: float, callback: Callable[[int], None], stream: int) -> None:
    asyncio.get_running_loop().call_later(delay, callback, stream)


def last_line(error: Exception) -> str:
    """Write the whole of an unforeseen error into the host's log, and return its last line."""
    traceback.print_exception(error, file=sys.stderr)
    return "".join(traceback.format_exception_only(error)).strip()
