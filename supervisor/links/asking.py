"""The asking half of a link: the streams that this end has opened, and the answers that come back on them.

Requests leave and replies arrive without any task of this file: `open` queues a frame, and each `on_...` runs in the
turn of the link's reader. A reply is checked against the rules of its request before the asker gets it, because the
other end may be wrong. A stream is free again when the other end has ended it, not when its asker has left: cancelled
requests must count as long as they occupy the other end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import trio
from attrs import define, field

from actors.kit.calls import Answer
from actors.kit.fast_path import put_token
from protocol import codec
from protocol.errors import Overloaded, RequestError
from protocol.frames import Cancel, End, Fail, Item, Open, Step
from protocol.kind import Message
from protocol.messages import Finished, Started, Tokens, Usage
from protocol.peer import Peer
from supervisor.links.encoding import ReplyRules, check_gathered, encode_body, remaining_ms, reply_rules, request_error
from supervisor.links.frame_writer import Send
from supervisor.links.traffic import Traffic

LinkAnswer: TypeAlias = Answer[Message, Message]


@define(eq=False)
class AskingHalf:
    """The requests of this end that have not ended."""

    peer: Peer
    send: Send
    traffic: Traffic  # counts the askers that had to wait
    lost_error: Callable[[str], RequestError]  # makes what askers get when nothing can be asked
    _unavailable: str | None = field(default=None, init=False)  # why nothing can be asked now
    _answers: dict[int, LinkAnswer] = field(factory=dict, init=False)
    _rules: dict[int, ReplyRules] = field(factory=dict, init=False)
    _left: set[int] = field(factory=set, init=False)  # streams that were cancelled and have not ended yet
    _permits: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def __len__(self) -> int:
        """The number of requests whose streams the other end has not ended."""
        return len(self._answers)

    # What askers do ----------------------------------------------------------------------

    def open(self, request: Message, credit: int, to: str) -> tuple[int, LinkAnswer]:
        """Ask without waiting; return the new stream's number and its answer.

        The asker's deadline goes with the request, unless its answer has a first reply: an asker may have one deadline
        for that, and a later one for the rest. Raises `Overloaded` if the other end serves as many streams as it may,
        `TooLarge` for a request that fits no frame, and the link's `lost_error` if it has ended or the other end stands
        still.
        """
        if self._unavailable is not None:
            raise self.lost_error(self._unavailable)
        streams = self.peer.asked
        if len(streams) >= streams.open_max:
            raise Overloaded(f"{len(streams)} streams are open on this link")
        stream = streams.last + 1
        body, attached, rules = encode_body(request), codec.attached(request), reply_rules(request)
        within_ms = remaining_ms() if rules.first is None else None
        answer = self._answers[stream] = Answer(credit)
        self._rules[stream] = rules
        try:
            self.send(Open(stream, body, credit, to, within_ms, sum(map(len, attached))), attached)
        except RequestError:  # too much is attached
            self._close(stream)
            raise
        return stream, answer

    @asynccontextmanager
    async def ask(self, request: Message, credit: int, to: str) -> AsyncIterator[LinkAnswer]:
        """Ask, waiting for a free stream; leaving the context cancels the request. Raises as `open` does."""
        await trio.lowlevel.checkpoint()
        while self._unavailable is None and len(self.peer.asked) >= self.peer.asked.open_max:
            self.traffic.waits += 1
            await self._permits.park()
        try:
            stream, answer = self.open(request, credit, to)
        except Exception:
            self._permits.unpark(count=1)  # the stream is still free, for the next one that waits
            raise
        try:
            yield answer
        finally:
            self.cancel(stream)
            answer.abandon()

    def cancel(self, stream: int) -> None:
        """Cancel a request; its stream is free again when the other end has ended it."""
        if self.peer.asked.state(stream) == "open":
            self._left.add(stream)
            self.send(Cancel(stream, "the asker left"))

    # What the link does ------------------------------------------------------------------

    def wake(self) -> None:
        """Wake everybody who waits for a free stream."""
        self._permits.unpark_all()

    def suspend(self, detail: str) -> None:
        """Fail all askers, and all requests from now on; streams still end as the other end says."""
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

    def end(self, detail: str) -> None:
        """Fail all askers, and all requests from now on: the link has ended."""
        self._unavailable = "the link is down"
        answers, self._answers = self._answers, {}
        self._rules.clear()
        for answer in answers.values():
            answer.fail(self.lost_error(detail))
        self.wake()

    # What arrives ------------------------------------------------------------------------

    def on_item(self, item: Item) -> None:
        """Deliver one reply."""
        reply = codec.decode(item.body, self.peer.attached)
        self._rules[item.stream].reply(reply, item.units)
        self._answers[item.stream].put(reply, item.units)

    def on_end(self, end: End) -> None:
        """End an answer with its result."""
        result = codec.decode(end.body) if end.body else None
        self._rules[end.stream].end(result)
        self._close(end.stream).end(result)

    def on_fail(self, fail: Fail) -> None:
        """End an answer with an error."""
        asker_left = fail.stream in self._left
        self._close(fail.stream).fail(request_error(fail, asker_left=asker_left))

    def on_gathered(self, step: Step) -> None:
        """Deliver tokens that another node has gathered; raises `PeerViolation` for what no node may send."""
        check_gathered(step, self._rules)
        self.on_step(step)

    def on_step(self, step: Step) -> None:
        """Deliver the tokens of one step of an engine, for many answers at once; hosts of this node are trusted."""
        answers, logprobs = self._answers, step.logprobs
        for begun in step.begun:
            answers[begun.stream].put(Started(begun.cached_tokens), 0)
        if not logprobs and step.counts.count(1) == len(step.counts):  # as in nearly every step
            now = trio.current_time()
            for stream, token in zip(step.streams, step.tokens, strict=True):
                put_token(answers[stream], token, now)
        else:
            for stream, ids in step.pieces():
                answers[stream].put(Tokens(tuple(ids), logprobs.get(stream, ())), len(ids))
        for ended in step.ended:
            usage = Usage(ended.prompt_tokens, ended.completion_tokens, ended.cached_tokens)
            self._close(ended.stream).end(Finished(ended.reason, usage, ended.matched))

    def _close(self, stream: int) -> LinkAnswer:
        del self._rules[stream]
        self._left.discard(stream)
        self._permits.unpark()
        return self._answers.pop(stream)
