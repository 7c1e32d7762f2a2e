"""Two honest ends never accuse each other, whatever the network's timing."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.errors import PeerViolation
from protocol.frames import Begun, Bye, Cancel, Credit, End, Ended, Fail, Item, Open, Step
from protocol.messages import FinishReason
from protocol.peer import Peer
from protocol.streams import CREDIT_MAX, NEXT, Streams

FRAMES = {Open, Credit, Cancel, Item, End, Fail}


class TwoEnds(RuleBasedStateMachine):
    """Both ends ask and answer; their bytes arrive in order, in any pieces, at any time."""

    def __init__(self):
        super().__init__()
        self.ends = (Peer("left", serves_max=3), Peer("right", serves_max=2))
        self.wires = (bytearray(), bytearray())  # wires[i]: from end i
        self.granted = ({}, {})  # what each end has granted to the streams it opened
        self.spent = ({}, {})  # what each end has put on the streams it serves

    which = st.integers(0, 1)

    @initialize(greeted=st.booleans())
    def greets(self, greeted):
        for end in (0, 1):
            self.wires[end].extend(self.ends[end].take())  # Hello
            if greeted:
                self.delivers(end, 1000)

    def say(self, end, frame):
        self.ends[end].send(frame)
        self.wires[end].extend(self.ends[end].take())

    def live(self, streams, state=("open", "leaving")):
        return [stream for stream in range(1, streams.last + 1) if streams.state(stream) in state]

    @rule(end=which, credit=st.integers(0, 3))
    def opens(self, end, credit):
        asked = self.ends[end].asked
        if len(asked) < asked.open_max:
            self.say(end, Open(asked.last + 1, b"x", credit))
            self.granted[end][asked.last] = credit

    @rule(end=which, data=st.data(), units=st.integers(0, 2))
    def grants(self, end, data, units):
        if streams := self.live(self.ends[end].asked, ("open", "closed")):
            stream = data.draw(st.sampled_from(streams))
            self.say(end, Credit(stream, units))
            self.granted[end][stream] += units

    @rule(end=which, data=st.data())
    def leaves(self, end, data):
        if streams := self.live(self.ends[end].asked, ("open",)):
            self.say(end, Cancel(data.draw(st.sampled_from(streams)), "left"))

    @rule(end=which, data=st.data())
    def replies(self, end, data):
        served = self.ends[end].served
        if streams := self.live(served):
            stream = data.draw(st.sampled_from(streams))
            units = data.draw(st.integers(0, served.credit(stream)))
            self.say(end, Item(stream, b"y", units))
            self.spent[end][stream] = self.spent[end].get(stream, 0) + units

    @rule(end=which, data=st.data())
    def ends_one(self, end, data):
        if streams := self.live(self.ends[end].served):
            stream = data.draw(st.sampled_from(streams))
            self.say(end, data.draw(st.sampled_from((End(stream, b""), Fail(stream, "internal", "x")))))

    @rule(end=which, data=st.data())
    def steps(self, end, data):
        served = self.ends[end].served
        if streams := self.live(served):
            chosen = data.draw(st.lists(st.sampled_from(streams), unique=True))
            counts = [data.draw(st.integers(0, served.credit(stream))) for stream in chosen]
            ended = data.draw(st.lists(st.sampled_from(streams), unique=True))
            begun = data.draw(st.lists(st.sampled_from(streams), unique=True))
            self.say(
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

    @precondition(lambda self: any(self.wires))
    @rule(end=which, size=st.sampled_from((1, 13, 1000, 1000)))
    def delivers(self, end, size):
        data = bytes(self.wires[end][:size])
        del self.wires[end][:size]
        list(self.ends[1 - end].receive(data))  # raises PeerViolation if it accuses

    @invariant()
    def nobody_spends_what_was_not_granted(self):
        for end in (0, 1):
            for stream, spent in self.spent[1 - end].items():
                assert spent <= self.granted[end][stream]

    @invariant()
    def the_answerer_never_holds_more_streams_than_the_asker(self):
        for end in (0, 1):
            assert len(self.ends[1 - end].served) <= len(self.ends[end].asked) or self.wires[1 - end]
            assert len(self.ends[1 - end].served) <= self.ends[1 - end].served.open_max

    @invariant()
    def when_quiet_both_ends_agree(self):
        if any(self.wires) or any(end.queued_bytes for end in self.ends):
            return
        for end in (0, 1):
            asked, served = self.ends[end].asked, self.ends[1 - end].served
            assert asked.last == served.last
            for stream in range(asked.last + 2):
                assert asked.state(stream) == served.state(stream)
                assert asked.credit(stream) == served.credit(stream)


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


# The table, case by case ------------------------------------------------------------------


def opened(credit=2, streams_max=4):
    streams = Streams(streams_max)
    streams.step(Open(1, b"", credit))
    return streams


def frame(kind, stream=1):
    return {
        Open: Open(stream, b"", 1),
        Credit: Credit(stream, 1),
        Cancel: Cancel(stream, "x"),
        Item: Item(stream, b"", 1),
        End: End(stream, b""),
        Fail: Fail(stream, "internal", "x"),
    }[kind]


def in_state(state):
    streams = Streams(4)
    for kind in {"new": (), "open": (Open,), "leaving": (Open, Cancel), "closed": (Open, End)}[state]:
        streams.step(frame(kind))
    return streams


@pytest.mark.parametrize("state", NEXT)
@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
def test_every_frame_in_every_state_does_what_the_table_says(state, kind):
    streams = in_state(state)
    assert streams.state(1) == state
    if kind in NEXT[state]:
        assert streams.step(frame(kind)) == NEXT[state][kind]
        assert streams.state(1) == NEXT[state][kind]
    else:
        with pytest.raises(PeerViolation, match="on stream 1, which is"):
            streams.step(frame(kind))
        assert streams.state(1) == state


@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stream", [-1, 0, 3, 2**62])
def test_no_stream_is_skipped_or_invented(kind, stream):
    with pytest.raises(PeerViolation):
        opened().step(frame(kind, stream))


def test_the_number_of_open_streams_has_a_limit():
    streams = opened(streams_max=1)
    with pytest.raises(PeerViolation, match="1 are open already"):
        streams.step(Open(2, b"", 0))
    streams.step(End(1, b""))
    streams.step(Open(2, b"", 0))
    assert len(streams) == 1


def test_a_stream_that_is_left_still_counts_until_its_answerer_closes_it():
    streams = opened(streams_max=1)
    streams.step(Cancel(1, "x"))
    with pytest.raises(PeerViolation):
        streams.step(Open(2, b"", 0))


@pytest.mark.parametrize("units", [-1, 3])
def test_a_reply_takes_no_more_than_it_was_granted_and_gives_nothing_back(units):
    with pytest.raises(PeerViolation, match="has credit for 2"):
        opened(2).step(Item(1, b"", units))


@pytest.mark.parametrize("units", [-1, CREDIT_MAX])
def test_credit_is_neither_negative_nor_endless(units):
    with pytest.raises(PeerViolation, match="units of credit"):
        opened(2).step(Credit(1, units))


def test_credit_for_a_closed_stream_means_nothing():
    streams = in_state("closed")
    streams.step(Credit(1, -5))
    assert streams.credit(1) == 0


@pytest.mark.parametrize(
    "step",
    [
        Step([1], [], [], [], []),
        Step([], [1], [7], [], []),
        Step([1], [1], [], [], []),
        Step([1], [1], [7, 8], [], []),
        Step([1], [3], [7, 8, 9], [], []),
        Step([1, 1], [2, 1], [7, 8, 9], [], []),
        Step([1, 1], [3, -1], [7, 8], [], []),
        Step([2], [1], [7], [], []),
        Step([0], [0], [], [], []),
        Step([], [], [], [Begun(2, 0)], []),
        Step([], [], [], [], [Ended(2, FinishReason.STOP, 1, 1, 0)]),
        Step([], [], [], [], [Ended(1, FinishReason.STOP, 1, 1, 0), Ended(1, FinishReason.STOP, 1, 1, 0)]),
    ],
    ids=repr,
)
def test_a_step_whose_arrays_lie_is_a_violation(step):
    with pytest.raises(PeerViolation):
        opened(2).step_tokens(step)


def test_a_step_spends_the_credit_of_each_and_closes_those_that_ended():
    streams = opened(2)
    streams.step(Open(2, b"", 5))
    streams.step_tokens(Step([1, 2], [2, 3], [7] * 5, [Begun(1, 0)], [Ended(1, FinishReason.LENGTH, 1, 2, 0)]))
    assert (streams.state(1), streams.state(2), streams.credit(2)) == ("closed", "open", 2)


def test_a_step_may_still_carry_tokens_for_one_who_left():
    streams = in_state("leaving")
    streams.step_tokens(Step([1], [1], [7], [], [Ended(1, FinishReason.STOP, 1, 1, 0)]))
    assert streams.state(1) == "closed"


def test_nothing_is_asked_before_the_other_end_has_said_how_much_it_serves():
    peer = Peer("a", serves_max=4)
    with pytest.raises(PeerViolation):
        peer.send(Open(1, b"", 0))


def test_a_bye_is_legal_at_any_moment():
    left, right = Peer("left", serves_max=1), Peer("right", serves_max=1)
    left.take()
    left.send(Bye("start_failed", "no device"))
    assert list(right.receive(left.take())) == [Bye("start_failed", "no device")]
