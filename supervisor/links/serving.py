"""The serving half of a link: the streams opened by the other end, each served by a task of its own.

A stream is closed when its service holds nothing more for it, not when its last reply is out: the other end takes a
free stream for free capacity. A service runs under a cancel scope with the asker's own deadline, sent as the time left.

Services are asked in the order of their requests' arrival: a router expects a prefix in the cache of a worker after an
earlier request with this prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.calls import Answer, Askable
from actors.kit.groups import first_leaf
from protocol.errors import AskerLeft, DeadlineExceeded, EngineLost, NotReady, PeerViolation, RequestError
from protocol.link import codec
from protocol.link.frames import Cancel, Credit, End, Fail, Item, Open, Taken
from protocol.link.peer import Peer
from protocol.messages.generation import Tokens
from protocol.messages.kind import Message
from supervisor.links.encoding import attachment, decode_body, encode_body, fail_frame
from supervisor.links.frame_writer import FrameWriter
from supervisor.links.tensor_road import TensorRoad, is_elsewhere

Service: TypeAlias = Askable[Message, Message, Message]
Services: TypeAlias = Mapping[tuple[str, type[Message]], Service]
"""The services for the other end, by name ("" for the node itself) and type of request."""


def under_name(name: str, services: Services) -> dict[type[Message], Service]:
    """Return the services that are asked for under a name, by the types of their requests."""
    return {kind: service for (its_name, kind), service in services.items() if its_name == name}


_Last: TypeAlias = tuple[Item | End | Fail, tuple[memoryview, ...]]
"""One of the last frames of a stream, with its attachment."""


@define(eq=False)
class _Call:
    """One request of the other end in service."""

    stream: int
    service: Service
    request: Message
    credit: int
    scope: trio.CancelScope
    answer: Answer[Message, Message] | None = None
    granted: int = 0  # credit from before there was an answer


@define(eq=False)
class ServingHalf:
    """The requests of the other end until they end."""

    peer: Peer
    writer: FrameWriter
    services: Services
    road: TensorRoad
    release_s: float  # the time of a call to release its resources, before its stream is closed all the same
    _calls: dict[int, _Call] = field(factory=dict, init=False)
    _unasked: deque[_Call] = field(factory=deque, init=False)  # calls without a running task yet
    _offered: dict[int, trio.Event] = field(factory=dict, init=False)  # by stream, set once the result has been read

    def __len__(self) -> int:
        """The number of calls in service, and of results whose tensors the other end may still read."""
        return len(self._calls) + len(self._offered)

    def on_open(self, nursery: trio.Nursery, frame: Open) -> None:
        """Start to serve a request; raises `PeerViolation` for a type of request never served here."""
        reader = self.road.reader
        request = decode_body(frame.body, self.peer.attached, remote=reader is not None)
        if reader is not None and is_elsewhere(request):
            reader.check(request)
        service = self.services.get((frame.to, type(request)))
        if service is None and not frame.to:
            raise PeerViolation(f"a {type(request).__name__} was asked of an end that serves none")
        if service is None:  # the worker may have been there a moment ago
            self.writer.send(fail_frame(frame.stream, NotReady(f"there is no {frame.to} here")))
            return
        remaining_s = inf if frame.within_ms is None else max(0, frame.within_ms) / 1000
        scope = trio.CancelScope(relative_deadline=remaining_s)
        call = self._calls[frame.stream] = _Call(frame.stream, service, request, frame.credit, scope)
        self._unasked.append(call)
        nursery.start_soon(self._serve_next)

    def on_credit(self, frame: Credit) -> None:
        """Add credit to a call."""
        if (call := self._calls.get(frame.stream)) is None:
            return
        if call.answer is None:
            call.granted += frame.units
        else:
            call.answer.credit += frame.units

    def on_cancel(self, frame: Cancel) -> None:
        """Cancel a call; its stream ends when the call has released its resources."""
        if (call := self._calls.get(frame.stream)) is not None:
            call.scope.cancel(reason=f"peer: {frame.reason}")
        if (taken := self._offered.get(frame.stream)) is not None:
            taken.set()

    async def _serve_next(self) -> None:
        """Serve the oldest waiting request, since Trio runs the tasks started in one turn in any order."""
        await self._serve(self._unasked.popleft())

    async def _serve(self, call: _Call) -> None:
        stream = call.stream
        last = _failure(stream, AskerLeft("the asker left"))
        result: Message | None = None
        try:
            try:
                with call.scope:
                    await self._read(call)
                    async with call.service.ask(call.request, call.credit) as answer:
                        answer.credit += call.granted
                        call.answer = answer
                        result = await answer.relay(partial(self._reply, stream))
                        last = _result_frames(stream, result)
                if call.scope.cancelled_caught and trio.current_time() >= call.scope.deadline:
                    last = _failure(stream, DeadlineExceeded("the asker's time is up"))
            except* RequestError as group:
                last = _failure(stream, first_leaf(group))
            if call.answer is not None:
                if not call.answer.over.is_set():
                    with trio.move_on_after(self.release_s, shield=True):
                        await call.answer.over.wait()
                # Sent even if the asker has left: the loss concerns the worker, not this answer alone.
                if isinstance(call.answer.failure, EngineLost):
                    last, result = _failure(stream, call.answer.failure), None
        finally:
            del self._calls[stream]
        if self.road.reader is not None and isinstance(last[-1][0], End) and result is not None and result.tensors:
            await self._offer(stream, result)
        else:
            self._send_last(stream, last)

    async def _read(self, call: _Call) -> None:
        """Read the tensors of a request that are in the memory of its asker."""
        if self.road.reader is not None and is_elsewhere(call.request):
            call.request = await self.road.reader.read(call.request)
            self.writer.send(Taken(call.stream))

    async def _offer(self, stream: int, result: Message) -> None:
        """Send a result whose tensors may stay in this node's memory, and keep them until they have been read.

        The asker cancels the stream then, or when it leaves.
        """
        taken = self._offered[stream] = trio.Event()
        try:
            async with self.road.carry(result) as carriage:
                self._send_last(stream, _result_frames(stream, carriage.message))
                if carriage.expire is not None:
                    with trio.move_on_after(self.road.lease_s):
                        await taken.wait()
        finally:
            del self._offered[stream]

    def _send_last(self, stream: int, last: list[_Last]) -> None:
        try:
            for frame, attached in last:
                self.writer.send(frame, attached)
        except RequestError as error:  # too many bytes are attached, and none have been sent
            self.writer.send(fail_frame(stream, error))

    def _reply(self, stream: int, reply: Message) -> None:
        if isinstance(reply, Tokens) and not reply.logprobs and self.writer.send_tokens(stream, reply.ids):
            return
        attached = attachment(reply)
        item = Item(stream, encode_body(reply), codec.units_of(reply), sum(map(len, attached)))
        self.writer.send(item, attached)


def _result_frames(stream: int, result: Message | None) -> list[_Last]:
    """Return the last frames of a stream with a result: its tensors with an `Item` of their own, then the result."""
    if result is None:
        return [(End(stream, b""), ())]
    end, attached = End(stream, encode_body(result)), attachment(result)
    tensors = [(Item(stream, b"", 0, sum(map(len, attached))), attached)] if attached else []
    return [*tensors, (end, ())]


def _failure(stream: int, error: RequestError) -> list[_Last]:
    return [(fail_frame(stream, error), ())]
