"""Two correct ends never raise a violation, whatever the timing of the network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.byte_budget import ByteShare
from protocol.errors import Overloaded, PeerViolation
from protocol.link import attachments
from protocol.link.frames import (
    Begun,
    Bye,
    Cancel,
    Credit,
    End,
    Ended,
    Fail,
    Frame,
    Item,
    Open,
    ReplyData,
    RequestData,
    Step,
    WindowUpdate,
)
from protocol.link.peer import Peer, PeerStatistics
from protocol.link.streams import CREDIT_MAX, Streams
from protocol.messages.generation import FinishReason

Numbers = tuple[dict[int, int], dict[int, int]]  # by stream, of either end
Bodies = tuple[dict[int, list[bytes]], dict[int, list[bytes]]]


class TwoEnds(RuleBasedStateMachine):
    """Both ends ask and answer; their bytes arrive in order, in any pieces, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.small = mock.patch.multiple(attachments, WINDOW_BYTES=7), mock.patch("protocol.link.peer.PIECE_BYTES", 3)
        for patch in self.small:
            patch.start()
        self.ends = (
            Peer("left", serves_max=3, attached_bytes_max=30),
            Peer("right", serves_max=2, attached_bytes_max=30),
        )
        self.in_flight = (bytearray(), bytearray())  # in_flight[i]: from end i
        self.granted: Numbers = ({}, {})  # the units that each end has granted to the streams it opened
        self.spent: Numbers = ({}, {})  # the units that each end has spent on the streams it serves
        self.credit: Numbers = ({}, {})  # by stream that each end still answers: the credit that it has been granted
        self.attached: dict[bytes, bytes] = {}  # by body, of which no two are equal: its attachment
        self.sent: Bodies = ({}, {})  # the replies that each end has sent on the streams it serves
        self.received: Bodies = ({}, {})  # the replies that each end has received on the streams it opened
        self.asking: tuple[list[ByteShare], list[ByteShare]] = ([], [])  # room for requests that are not sent yet

    which = st.integers(0, 1)
    sizes = st.sampled_from((0, 0, 1, 3, 8, 20))

    @initialize(greeted=st.sampled_from((True, True, True, False)), eager=st.booleans())
    def greets(self, greeted: bool, eager: bool) -> None:
        self.eager = eager
        for end in (0, 1):
            self.writes(end)  # Hello
            if greeted:
                self.delivers(end, 1000)
        if greeted:  # streams that are open already are what most rules need
            self.opens(0, 5, 0)
            self.opens(1, 5, 0)
            self.settles()

    def send(
        self, end: int, frame: Frame, views: tuple[memoryview[int], ...] = (), share: ByteShare | None = None
    ) -> bool:
        """Send a frame, unless it is a request for which there is no room; return whether it was sent."""
        try:
            self.ends[end].send(frame, views, share)
        except Overloaded:
            return False
        if self.eager:
            self.writes(end)
        return True

    @rule(end=which)
    def writes(self, end: int) -> None:
        ready = self.ends[end].ready
        data = self.ends[end].data_to_send()
        assert bool(data) == ready
        self.in_flight[end].extend(data)

    def body(self, size: int) -> tuple[bytes, tuple[memoryview[int], memoryview[int]] | tuple[()]]:
        """Return a new body, and a new attachment for it."""
        number = len(self.attached)
        body = b"%d" % number
        self.attached[body] = bytes((number * 7 + place) % 256 for place in range(size))
        half = memoryview(self.attached[body])
        return body, (half[: size // 2], half[size // 2 :]) if size else ()

    def live(self, streams: Streams, state: tuple[str, ...] = ("open", "leaving")) -> list[Any]:
        return [stream for stream in range(1, streams.last + 1) if streams.state(stream) in state]

    @rule(end=which, credit=st.integers(0, 5), size=sizes)
    def opens(self, end: int, credit: int, size: int) -> None:
        asked = self.ends[end].asked
        if len(asked) < asked.open_max:
            self.opens_with(end, credit, size, None)

    def opens_with(self, end: int, credit: int, size: int, share: ByteShare | None) -> None:
        body, views = self.body(size)
        stream = self.ends[end].asked.last + 1
        if self.send(end, Open(stream, body, credit, attached=size), views, share):
            self.granted[end][stream] = credit
            self.received[end][stream] = []

    @rule(end=which, size=sizes)
    def wants_room(self, end: int, size: int) -> None:
        """Ask for room for a request; it is opened, or given back, later."""
        if size and self.ends[end].hello is not None and len(self.asking[end]) < 3:
            self.asking[end].append(self.ends[end].share(size, lambda: None))

    @precondition(lambda self: any(self.asking))
    @rule(end=which, leaves=st.booleans(), which_one=st.integers(0, 2))
    def uses_room(self, end: int, leaves: bool, which_one: int) -> None:
        if which_one >= len(self.asking[end]):
            return
        share, asked = self.asking[end][which_one], self.ends[end].asked
        if leaves:
            share.give_back()
        elif share.taken and len(asked) < asked.open_max:
            self.opens_with(end, 1, share.size, share)
        else:
            return
        self.asking[end].remove(share)

    @rule(end=which, data=st.data(), units=st.integers(0, 2))
    def grants(self, end: int, data: st.DataObject, units: int) -> None:
        if streams := self.live(self.ends[end].asked, ("open", "closed")):
            stream = data.draw(st.sampled_from(streams))
            self.send(end, Credit(stream, units))
            self.granted[end][stream] += units

    @rule(end=which, data=st.data())
    def leaves(self, end: int, data: st.DataObject) -> None:
        if streams := self.live(self.ends[end].asked, ("open",)):
            self.send(end, Cancel(data.draw(st.sampled_from(streams)), "left"))

    @rule(end=which, data=st.data(), size=sizes)
    def replies(self, end: int, data: st.DataObject, size: int) -> None:
        if streams := sorted(self.credit[end]):
            stream = data.draw(st.sampled_from(streams))
            units = data.draw(st.integers(0, min(2, self.ends[end].served.credit(stream))))
            body, views = self.body(size)
            if self.send(end, Item(stream, body, units, size), views):
                self.spent[end][stream] = self.spent[end].get(stream, 0) + units
                self.sent[end].setdefault(stream, []).append(body)

    @rule(end=which, data=st.data())
    def ends_one(self, end: int, data: st.DataObject) -> None:
        if streams := sorted(self.credit[end]):
            stream = data.draw(st.sampled_from(streams))
            last: tuple[Frame, Frame] = (End(stream, b""), Fail(stream, "internal", "x"))
            self.send(end, data.draw(st.sampled_from(last)))
            del self.credit[end][stream]

    @rule(end=which, data=st.data())
    def steps(self, end: int, data: st.DataObject) -> None:
        served = self.ends[end].served
        if streams := [stream for stream in sorted(self.credit[end]) if self.ends[end].takes_steps(stream)]:
            chosen = data.draw(st.lists(st.sampled_from(streams), unique=True))
            counts = [data.draw(st.integers(0, served.credit(stream))) for stream in chosen]
            ended = data.draw(st.lists(st.sampled_from(streams), unique=True))
            begun = data.draw(st.lists(st.sampled_from(streams), unique=True))
            self.send(
                end,
                Step(
                    chosen,
                    counts,
                    list(range(sum(counts))),
                    [Begun(stream, 0) for stream in begun],
                    [Ended(stream, FinishReason.STOP, 1, 1, 0) for stream in ended],
                ),
            )
            for stream, count in zip(chosen, counts, strict=True):
                self.spent[end][stream] = self.spent[end].get(stream, 0) + count
            for stream in ended:
                del self.credit[end][stream]

    @precondition(lambda self: any(self.in_flight))
    @rule(end=which, size=st.sampled_from((1, 13, 1000, 1000)))
    def delivers(self, end: int, size: int) -> None:
        data = bytes(self.in_flight[end][:size])
        del self.in_flight[end][:size]
        peer = self.ends[1 - end]
        for frame in peer.receive_data(data):  # raises PeerViolation if the other end was wrong
            self.handles(1 - end, frame, bytes(peer.attached))
        assert not peer.attached

    def handles(self, end: int, frame: Frame, data: bytes) -> None:
        match frame:
            case Open():
                assert data == self.attached[frame.body]
                self.credit[end][frame.stream] = frame.credit
            case Credit() if frame.stream in self.credit[end]:
                self.credit[end][frame.stream] += frame.units
            case Item():
                assert data == self.attached[frame.body]
                self.received[end][frame.stream].append(frame.body)
                received, sent = self.received[end][frame.stream], self.sent[1 - end][frame.stream]
                assert received == sent[: len(received)] or self.cancelled(end, frame)
            case _:
                assert not data
                assert not isinstance(frame, RequestData | ReplyData | WindowUpdate)

    def cancelled(self, end: int, frame: Item) -> bool:
        return self.ends[end].asked.state(frame.stream) == "leaving"

    @invariant()
    def no_end_spends_more_than_it_was_granted(self) -> None:
        for end in (0, 1):
            for stream, spent in self.spent[1 - end].items():
                assert spent <= self.granted[end][stream]

    @invariant()
    def the_answerer_never_holds_more_streams_than_the_asker(self) -> None:
        for end in (0, 1):
            assert len(self.ends[1 - end].served) <= len(self.ends[end].asked) or self.in_flight[1 - end]
            assert len(self.ends[1 - end].served) <= self.ends[1 - end].served.open_max

    @invariant()
    def when_quiet_both_ends_agree(self) -> None:
        # An `Item` that waits for room has spent its credit at one end alone.
        if any(self.in_flight) or any(end.ready or end.statistics().waiting for end in self.ends):
            return
        for end in (0, 1):
            asked, served = self.ends[end].asked, self.ends[1 - end].served
            assert asked.last == served.last
            for stream in range(asked.last + 2):
                assert asked.state(stream) == served.state(stream)
                assert asked.owed(stream) == served.owed(stream)
                left = served.state(stream) == "leaving"  # what was cut short has spent its credit and is never sent
                assert asked.credit(stream) == served.credit(stream) or left
            for stream, credit in self.credit[1 - end].items():
                assert served.state(stream) == "leaving" or credit == self.granted[end][stream]
            held, reserved = self.ends[end].statistics(), [share for share in self.asking[end] if share.taken]
            expected = PeerStatistics(held.asked, held.served, sending_bytes=sum(share.size for share in reserved))
            assert reserved or held == expected, "a quiet end holds bytes"
            assert not self.ends[end].attached

    def teardown(self) -> None:
        try:
            for end in (0, 1):
                for share in self.asking[end]:
                    share.give_back()
                self.asking[end].clear()
            self.settles()
            for end in (0, 1):
                for stream in sorted(self.credit[end]):
                    self.send(end, End(stream, b""))
                self.credit[end].clear()
            self.settles()
            for peer in self.ends:
                assert peer.statistics() == PeerStatistics()
                assert not peer.asked.owing
                assert not peer.served.owing
        finally:
            for patch in self.small:
                patch.stop()

    @rule()
    def settles(self) -> None:
        """Deliver everything that was sent; it takes a limited number of messages."""
        for _ in range(1000):
            if not (any(end.ready for end in self.ends) or any(self.in_flight)):
                break
            for end in (0, 1):
                self.writes(end)
                self.delivers(end, 1000)
        else:
            pytest.fail("the two ends never come to rest")
        self.when_quiet_both_ends_agree()


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# The table, case by case ------------------------------------------------------------------


def opened(credit: int = 2, streams_max: int = 4) -> Streams:
    streams = Streams(streams_max)
    streams.step(Open(1, b"", credit))
    return streams


def test_the_number_of_open_streams_has_a_limit() -> None:
    streams = opened(streams_max=1)
    with pytest.raises(PeerViolation, match="1 are open already"):
        streams.step(Open(2, b"", 0))
    streams.step(End(1, b""))
    streams.step(Open(2, b"", 0))
    assert len(streams) == 1


def test_a_cancelled_stream_counts_until_its_answerer_closes_it() -> None:
    streams = opened(streams_max=1)
    streams.step(Cancel(1, "x"))
    with pytest.raises(PeerViolation):
        streams.step(Open(2, b"", 0))


@pytest.mark.parametrize("units", [-1, 3])
def test_a_reply_spends_from_zero_units_to_its_credit(units: int) -> None:
    with pytest.raises(PeerViolation, match="has credit for 2"):
        opened(2).step(Item(1, b"", units))


@pytest.mark.parametrize("units", [-1, CREDIT_MAX])
def test_credit_is_neither_negative_nor_beyond_its_maximum(units: int) -> None:
    with pytest.raises(PeerViolation, match="units of credit"):
        opened(2).step(Credit(1, units))


def waits_for(asking: int = 0, replying: int = 0) -> Streams:
    streams = Streams(4)
    streams.step(Open(1, b"", 2, attached=asking))
    if replying:
        streams.step(Item(1, b"", 1, replying))
    return streams


@pytest.mark.parametrize("owed", [{"asking": 5}, {"replying": 5}], ids=str)
@pytest.mark.parametrize(
    "reply",
    [
        Item(1, b"", 1),
        Item(1, b"", 0, 1),
        End(1, b""),
        Step([1], [1], [7], [], []),
        Step([], [], [], [Begun(1, 0)], []),
        Step([], [], [], [], [Ended(1, FinishReason.STOP, 1, 1, 0)]),
    ],
    ids=repr,
)
def test_a_reply_before_the_attachment_is_complete_is_a_violation(owed: dict[str, int], reply: Any) -> None:
    streams = waits_for(**owed)
    with pytest.raises(PeerViolation, match="before 5 bytes that were to come first"):
        streams.step_tokens(reply) if isinstance(reply, Step) else streams.step(reply)
    assert streams.state(1) == "open"


def test_a_step_may_have_tokens_for_a_cancelled_stream() -> None:
    streams = opened()
    streams.step(Cancel(1, "x"))
    streams.step_tokens(Step([1], [1], [7], [], [Ended(1, FinishReason.STOP, 1, 1, 0)]))
    assert streams.state(1) == "closed"


def test_a_bye_is_legal_at_any_moment() -> None:
    left, right = Peer("left", serves_max=1), Peer("right", serves_max=1)
    left.data_to_send()
    left.send(Bye("start_failed", "no device"))
    assert list(right.receive_data(left.data_to_send())) == [Bye("start_failed", "no device")]
