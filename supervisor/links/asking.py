"""The asking half of a link: the streams opened by this end, with their answers.

Requests leave and replies arrive without any task of this file: `open` queues a frame, and each `on_...` runs in the
turn of the link's reader. A reply is checked against the rules of its request before the asker gets it, because the
other end may be wrong. A stream is free again when the other end has ended it, not when its asker has left: cancelled
requests must count as long as they occupy the other end. Requests leave in the order of asking; waiters for a stream
are woken one after the other, since Trio runs tasks woken together in any order.

A request with tensors is the exception: its tensors have to be carried first, and may have to wait for room, so it has
a task in the link's nursery, and others overtake it. It counts as a stream from the beginning: a request with room must
not have to wait for a stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.calls import Answer
from actors.kit.fast_path import put_token
from protocol.byte_budget import ByteShare
from protocol.errors import AskerLeft, InternalError, Overloaded, RequestError
from protocol.link import codec
from protocol.link.attachments import Views
from protocol.link.frames import Begun, Cancel, End, Fail, Item, Open, Step, Taken
from protocol.link.peer import Peer
from protocol.messages.generation import Finished, Started, Tokens, Usage, one_token
from protocol.messages.kind import Message
from supervisor.links.carried_request import CarriedRequest
from supervisor.links.elsewhere import ResultElsewhere
from supervisor.links.encoding import (
    ReplyRules,
    attachment,
    check_gathered,
    decode_body,
    encode_body,
    remaining_ms,
    reply_rules,
    request_error,
)
from supervisor.links.frame_writer import FrameWriter
from supervisor.links.tensor_road import TensorRoad, is_elsewhere
from supervisor.links.traffic import Traffic
from supervisor.links.waiting import taken_share

log = logging.getLogger(__name__)

LinkAnswer: TypeAlias = Answer[Message, Message]


@define(eq=False)
class AskingHalf:
    """The requests of this end until they end.

    A plain request has the number of its stream. A request with tensors has a negative number, since its stream opens
    later; `_numbers` leads from the stream back to it.
    """

    peer: Peer
    writer: FrameWriter
    road: TensorRoad
    traffic: Traffic
    lost_error: Callable[[str], RequestError]  # makes the error for askers of an unavailable link
    nursery: trio.Nursery | None = field(default=None, init=False)  # the running link's
    _unavailable: str | None = field(default=None, init=False)  # the reason to refuse requests now
    _answers: dict[int, LinkAnswer] = field(factory=dict, init=False)
    _rules: dict[int, ReplyRules] = field(factory=dict, init=False)
    _permits: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)
    _woken: int = field(default=0, init=False)  # woken waiters whose tasks have not run yet
    _carried: dict[int, CarriedRequest] = field(factory=dict, init=False)
    _numbers: dict[int, int] = field(factory=dict, init=False)
    _last_carried: int = field(default=0, init=False)
    _unsent: int = field(default=0, init=False)  # requests with tensors that have not been sent
    _readings: dict[int, ResultElsewhere] = field(factory=dict, init=False)  # by number, of ended streams

    def __len__(self) -> int:
        """The number of unsent requests, and of requests with a stream that the other end has not ended."""
        return len(self._answers) + self._unsent + len(self._readings)

    # What askers do ----------------------------------------------------------------------

    def open(self, request: Message, credit: int, to: str) -> tuple[int, LinkAnswer]:
        """Ask without waiting; return the request's number, for `cancel`, and its answer.

        The asker's deadline goes with the request, unless its answer has a first reply: an asker may have one deadline
        for the first reply, and a later one for the rest. Waits for tensors are part of the answer. Raises `Overloaded`
        if the other end serves as many streams as it may, `TooLarge` for a request that fits no frame, and the link's
        `lost_error` if it has ended or the other end is stalled.
        """
        if self._unavailable is not None:
            raise self.lost_error(self._unavailable)
        if not self._has_stream:
            raise Overloaded(f"{self.peer.asked.open_max} streams are open on this link")
        has_bytes = type(request) in codec.WITH_TENSORS and any(len(tensor.data) for tensor in request.tensors)
        body = b"" if has_bytes else encode_body(request)
        answer, rules = LinkAnswer(credit), reply_rules(request)
        until = trio.current_effective_deadline() if rules.first is None else inf
        if has_bytes:
            return self._start_carrying(CarriedRequest(request, credit, to, until, answer)), answer
        frame = Open(self.peer.asked.last + 1, body, credit, to, remaining_ms(until))
        return self._send_open(frame, rules, answer), answer

    @asynccontextmanager
    async def ask(self, request: Message, credit: int, to: str) -> AsyncIterator[LinkAnswer]:
        """Ask, waiting for a free stream; leaving the context cancels the request. Raises as `open` does.

        With a free stream the request leaves in this turn: in the next turn later ones might overtake it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        is_behind = bool(self._permits or self._woken)
        while self._unavailable is None and (is_behind or not self._has_stream):
            self.traffic.waited()
            await self._permits.park()
            self._woken -= 1
            is_behind = False
        try:
            number, answer = self.open(request, credit, to)
        finally:
            self.wake()
        try:
            yield answer
        finally:
            self.cancel(number)
            answer.abandon()

    def cancel(self, number: int) -> None:
        """Cancel a request; its stream is free again when the other end has ended it."""
        stream: int | None = number
        if (carried := self._carried.get(number)) is not None:
            carried.leave(AskerLeft("the asker left"))
            stream = carried.stream
        if (reading := self._readings.get(number)) is not None:
            reading.fail(AskerLeft("the asker left"))
        if stream is not None and self.peer.asked.state(stream) == "open":
            if (rules := self._rules.get(stream)) is not None:  # else the link has just ended
                rules.left = True
            self.writer.send(Cancel(stream, "the asker left"))

    @property
    def _has_stream(self) -> bool:
        return len(self.peer.asked) + self._unsent + self._woken < self.peer.asked.open_max

    def _send_open(
        self, frame: Open, rules: ReplyRules, answer: LinkAnswer, attached: Views = (), share: ByteShare | None = None
    ) -> int:
        self._answers[frame.stream], self._rules[frame.stream] = answer, rules
        self.writer.send(frame, attached, share)
        return frame.stream

    # Requests with tensors ---------------------------------------------------------------

    def _start_carrying(self, carried: CarriedRequest) -> int:
        """Carry a request in a task of its own, and return its number."""
        assert self.nursery is not None  # else no stream would be open
        self._last_carried -= 1
        self._unsent += 1
        self._carried[self._last_carried] = carried
        self.nursery.start_soon(self._carry, self._last_carried, carried)
        return self._last_carried

    async def _carry(self, number: int, carried: CarriedRequest) -> None:
        """Send a request once its tensors have been carried, and keep their lease until it is over."""
        try:
            with carried.scope:
                async with self.road.carry(carried.request) as carriage:
                    carried.expire = carriage.expire
                    await self._send_carried(number, carried, carriage.message)
                    await carried.hold(self.road.lease_s)
        except RequestError as error:
            carried.fail_unsent(error)
        except Exception:
            log.exception("a bug failed a %s", type(carried.request).__name__)
            carried.fail_unsent(InternalError("the node made a mistake; its log has the details"))
        finally:
            if carried.stream is None:
                del self._carried[number]
                self._unsent -= 1
                self.wake()

    async def _send_carried(self, number: int, carried: CarriedRequest, request: Message) -> None:
        """Send a request with attached or described tensors, once there is room for its attachment."""
        body, attached, share = encode_body(request), attachment(request), None
        size = sum(map(len, attached))
        if size:
            share = await taken_share(partial(self.peer.share, size), self.traffic.waited, self.writer.wake)
        frame = Open(self.peer.asked.last + 1, body, carried.credit, carried.to, remaining_ms(carried.until), size)
        self._unsent -= 1
        carried.stream = self._send_open(frame, reply_rules(carried.request), carried.answer, attached, share)
        self._numbers[frame.stream] = number

    # What the link does ------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the first waiter if a stream is free, which then wakes the next; wake all if the link is unavailable."""
        if self._unavailable is not None:
            self._woken += len(self._permits.unpark(count=len(self._permits)))
        elif self._permits and not self._woken and self._has_stream:
            self._woken += len(self._permits.unpark())

    def suspend(self, detail: str) -> None:
        """Fail all askers, and all requests from now on; the other end still ends its streams."""
        self._unavailable = detail
        self.fail_all(partial(self.lost_error, detail))
        self.wake()

    def resume(self) -> None:
        """Allow requests again."""
        self._unavailable = None

    def fail_all(self, error: Callable[[], RequestError]) -> None:
        """Fail all askers, each with an error of its own; they may ask elsewhere."""
        for answer in self._answers.values():
            answer.fail(error())
        for carried in self._carried.values():
            carried.fail_unsent(error())
        for reading in self._readings.values():
            reading.fail(error())

    def end(self, detail: str) -> None:
        """Fail all askers, and all requests from now on: the link has ended."""
        self._unavailable = "the link is down"
        answers, self._answers = self._answers, {}
        self._rules.clear()
        for answer in answers.values():
            answer.fail(self.lost_error(detail))
        for carried in self._carried.values():
            carried.fail_unsent(self.lost_error(detail))
        for reading in self._readings.values():
            reading.fail(self.lost_error(detail))
        self.wake()

    # What arrives ------------------------------------------------------------------------

    def check_attached(self, item: Item) -> None:
        """Raise `PeerViolation` for attached bytes that the request of an `Item` does not allow, before they come."""
        if (rules := self._rules.get(item.stream)) is not None:  # else the link has just ended
            rules.check_attached(item)

    def on_item(self, item: Item) -> None:
        """Deliver one reply, or keep the tensors of the next result."""
        if not item.body:
            self._rules[item.stream].attach(self.peer.attached)
            return
        rules = self._rules[item.stream]
        rules.check_size(item)
        reply = decode_body(item.body, self.peer.attached, shared=self.road.shares)
        rules.reply(reply, item.units)
        if self.road.shares and type(reply) in codec.WITH_TENSORS:
            try:
                reply = self._take(reply, rules)
            except RequestError as error:
                rules.failure = error
                self.cancel(item.stream)
                return
        self._answers[item.stream].put(reply, item.units)

    def on_end(self, end: End) -> None:
        """End an answer with its result."""
        rules = self._rules[end.stream]
        # The tensors of a cancelled request's result were dropped on arrival, so the result cannot be read.
        if rules.left and rules.result in codec.WITH_TENSORS:
            self._close(end.stream).end(None)
            return
        attached = rules.attached or codec.NOTHING
        road = self.road
        result = (
            decode_body(end.body, attached, shared=road.shares, remote=road.reader is not None) if end.body else None
        )
        rules.end(result)
        if result is not None and road.reader is not None and is_elsewhere(result):
            road.reader.check(result)
            self._read(end.stream, result)
            return
        if result is not None and self.road.shares and rules.failure is None:
            try:
                result = self._take(result, rules)
            except RequestError as error:
                rules.failure = error
        self._close(end.stream).end(result)

    def _read(self, stream: int, result: Message) -> None:
        """Read the tensors of a result from the other end's memory, in a task, and end the answer with them."""
        assert self.nursery is not None
        assert self.road.reader is not None
        number = self._numbers.get(stream, stream)
        reading = self._readings[number] = ResultElsewhere(self._close(stream), result)

        def done() -> None:
            del self._readings[number]
            self.writer.send(Cancel(stream, "the tensors were taken"))  # frees the answerer's memory

        self.nursery.start_soon(reading.run, self.road.reader, done)

    def on_taken(self, taken: Taken) -> None:
        """Free the memory of the tensors of a request, which the other end has read."""
        carried = self._carried.get(self._numbers.get(taken.stream, 0))
        if carried is not None and carried.expire is not None:
            carried.expire()

    def on_fail(self, fail: Fail) -> None:
        """End an answer with an error."""
        asker_left = self._rules[fail.stream].left
        self._close(fail.stream).fail(request_error(fail, asker_left=asker_left))

    def on_gathered(self, step: Step) -> None:
        """Deliver tokens gathered by another node; raises `PeerViolation` for a `Step` that only hosts may send."""
        check_gathered(step, self._rules)
        self.on_step(step)

    def on_step(self, step: Step) -> None:
        """Deliver the tokens of one step of an engine, for many answers at once; hosts of this node are trusted."""
        answers, logprobs = self._answers, step.logprobs
        for begun in step.begun:
            answers[begun.stream].put(_beginning(begun), 0)
        # Nearly every step has one token a stream, which needs no list of its own.
        if not logprobs and step.counts.count(1) == len(step.counts):
            now = trio.current_time()
            for stream, token in zip(step.streams, step.tokens, strict=True):
                put_token(answers[stream], token, now, one_token)
        else:
            for stream, ids in step.pieces():
                answers[stream].put(Tokens(tuple(ids), logprobs.get(stream, ())), len(ids))
        for ended in step.ended:
            usage = Usage(ended.prompt_tokens, ended.completion_tokens, ended.cached_tokens)
            self._close(ended.stream).end(Finished(ended.reason, usage, ended.matched))

    def _take(self, message: Message, rules: ReplyRules) -> Message:
        """Return a message with the bytes of its tensors, also from shared memory; raises `RequestError`."""
        if all(tensor.shared is None for tensor in message.tensors):
            return message
        rules.shared = True
        return self.road.take(message)

    def _close(self, stream: int) -> LinkAnswer:
        rules, answer = self._rules.pop(stream), self._answers.pop(stream)
        self._carried.pop(self._numbers.pop(stream, 0), None)
        self.wake()
        if rules.shared:  # releases the answerer's shared memory
            self.writer.send(Cancel(stream, "the tensors were taken"))
        if rules.failure is not None:
            answer.fail(rules.failure)
        return answer


def _beginning(begun: Begun) -> Started | Tokens:
    """Return the reply before the first token of an answer, or before its first one of new weights."""
    if begun.continues:
        return Tokens((), version=begun.version)
    return Started(begun.cached_tokens, version=begun.version)
