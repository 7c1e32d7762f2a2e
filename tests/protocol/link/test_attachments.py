"""Attachments are sent in pieces: they delay no other frame, arrive whole, and leave nothing when a stream ends early."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import LocalViolation, Overloaded, PeerViolation, TooLarge
from protocol.link.attachments import PIECE_BYTES, WINDOW_BYTES
from protocol.link.frames import (
    ATTACHED_BYTES_MAX,
    VERSION,
    Announce,
    Cancel,
    Credit,
    End,
    Fail,
    Frame,
    FrameReader,
    Hello,
    Item,
    Open,
    ReplyData,
    RequestData,
    WindowUpdate,
    encode,
)
from protocol.link.peer import Peer, PeerStatistics

LEFT = Fail(1, "left", "the asker left")


def bytes_of(size: int, seed: int = 0) -> bytes:
    return (bytes(range(seed, 256)) * (size // (256 - seed) + 1))[:size]


def views(*data: bytes) -> tuple[Any, ...]:
    return tuple(map(memoryview, data))


class Pair:
    """Two ends after their greeting: `near` asks and `far` answers."""

    def __init__(self, *, streams: int = 4, **fields: Any) -> None:
        self.near, self.far = Peer("near", serves_max=0, **fields), Peer("far", serves_max=streams, **fields)
        self.to_near(), self.to_far()

    def to_far(self) -> list[Any]:
        """Carry one message to the far end; return the frames that it yields, with their attachments."""
        return receive(self.far, self.near.data_to_send())

    def to_near(self) -> list[Any]:
        return receive(self.near, self.far.data_to_send())

    def settle(self) -> tuple[list[Any], list[Any]]:
        """Carry all messages; return the frames that either end yields."""
        received: tuple[list[Any], list[Any]] = ([], [])
        while self.near.ready or self.far.ready:
            received[0].extend(self.to_near())
            received[1].extend(self.to_far())
        return received

    def ask(self, data: bytes = b"", credit: int = 9) -> int:
        stream = self.near.asked.last + 1
        self.near.send(Open(stream, b"ask", credit, attached=len(data)), views(data) if data else ())
        return stream

    def open(self, **fields: Any) -> None:
        """Open a stream whose request has arrived."""
        self.ask(**fields)
        self.settle()

    def reply(self, data: bytes, body: bytes = b"reply", units: int = 1) -> None:
        self.far.send(Item(1, body, units, len(data)), views(data))

    def at_rest(self) -> bool:
        """Return whether neither end holds anything."""
        assert not self.near.asked.owing
        assert not self.far.served.owing
        return self.near.statistics() == self.far.statistics() == PeerStatistics()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def receive(peer: Peer, data: bytes) -> list[Any]:
    return [(frame, bytes(peer.attached)) for frame in peer.receive_data(data)]


def frames(data: bytes) -> list[Any]:
    return list(FrameReader().feed(data))


def facing(*sent: Frame, streams: int = 4, **fields: Any) -> tuple[Peer, Any]:
    """Return an end that serves, and the frames that it yields of those that an asker has sent."""
    peer = Peer("here", serves_max=streams, **fields)
    yielded = receive(peer, b"".join(map(encode, (Hello(VERSION, "there", streams), *sent))))[1:]
    peer.data_to_send()
    return peer, yielded


def asking(*sent: Frame, **fields: Any) -> tuple[Any, Any]:
    """Return an end that asks, and the frames that it yields of those that an answerer has sent."""
    peer, _ = facing(**fields)
    peer.send(Open(1, b"", 9))
    peer.data_to_send()
    return peer, receive(peer, b"".join(map(encode, sent)))


# Complete attachments --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, WINDOW_BYTES, 3 * WINDOW_BYTES + 5])
def test_a_request_and_a_reply_arrive_whole(pair: Pair, size: int) -> None:
    data = bytes_of(size)
    pair.ask(data)
    near, far = pair.settle()
    assert (near, far) == ([], [(Open(1, b"ask", 9, attached=size), data)])
    pair.reply(data)
    pair.far.send(End(1, b"done"))
    near, far = pair.settle()
    assert (near, far) == ([(Item(1, b"reply", 1, size), data), (End(1, b"done"), b"")], [])
    assert pair.at_rest()


def test_small_buffers_are_sent_together(pair: Pair) -> None:
    pair.near.send(Open(1, b"", 1, attached=3000), views(*[b"abc"] * 1000))
    assert [type(frame) for frame in frames(pair.near.data_to_send())] == [Open, RequestData]


def test_buffers_of_other_shapes_are_their_bytes(pair: Pair) -> None:
    grid: memoryview[Any] = memoryview(bytes_of(64)).cast("f", (4, 4))
    pair.near.send(Open(1, b"", 1, attached=64), (grid,))
    assert pair.settle()[1][0][1] == bytes_of(64)


def test_an_attachment_is_dropped_after_its_frame_was_handled(pair: Pair) -> None:
    pair.ask(b"abc")
    receiving = pair.far.receive_data(pair.near.data_to_send())
    next(receiving)
    assert bytes(pair.far.attached) == b"abc"
    assert pair.far.attached.readonly
    receiving.close()  # type: ignore[attr-defined]  # as when its consumer raises
    assert not pair.far.attached


# Other frames are not delayed -------------------------------------------------------------------


def test_a_frame_is_sent_with_the_next_message_while_100_mb_wait(pair: Pair) -> None:
    pair.ask(bytes(100 * 1024 * 1024))
    pair.near.data_to_send()
    pair.near.send(Announce(b"x"))
    first, *rest = frames(pair.near.data_to_send())
    assert first == Announce(b"x")
    assert [len(frame.data) for frame in rest] == [PIECE_BYTES]


def test_a_message_has_at_most_one_piece_and_the_window_limits_the_bytes_in_flight(pair: Pair) -> None:
    pair.ask(bytes(100 * 1024 * 1024))
    sizes = []
    while data := pair.near.data_to_send():
        sizes.append(sum(len(frame.data) for frame in frames(data) if isinstance(frame, RequestData)))
    assert max(sizes) == PIECE_BYTES
    assert sum(sizes) == WINDOW_BYTES
    assert not pair.near.ready
    pair.near.send(Announce(b"x"))  # a full window delays no other frame
    assert frames(pair.near.data_to_send()) == [Announce(b"x")]


def test_received_bytes_are_acknowledged_at_once_in_one_frame(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.to_far()
    pair.to_far()
    assert pair.far.ready
    assert frames(pair.far.data_to_send()) == [WindowUpdate(2 * PIECE_BYTES)]
    assert not pair.far.ready


def test_streams_take_turns(pair: Pair) -> None:
    for seed in range(3):
        pair.ask(bytes_of(2 * PIECE_BYTES, seed))
    turns = []
    while pair.near.ready:
        data = pair.near.data_to_send()
        turns += [frame.stream for frame in frames(data) if isinstance(frame, RequestData)]
        receive(pair.far, data)
        pair.to_near()
    assert turns == [1, 2, 3, 1, 2, 3]


# The order within a stream ----------------------------------------------------------------


def test_later_frames_of_a_stream_wait_behind_its_attachment(pair: Pair) -> None:
    pair.open()
    big, bigger = bytes_of(3 * PIECE_BYTES), bytes_of(4 * PIECE_BYTES, 1)
    pair.reply(big, b"1")
    pair.far.send(Item(1, b"2", 1))
    pair.reply(bigger, b"3")
    pair.far.send(Item(1, b"4", 1))
    pair.far.send(End(1, b"5"))
    received = [(frame.body, data) for frame, data in pair.settle()[0]]
    assert received == [(b"1", big), (b"2", b""), (b"3", bigger), (b"4", b""), (b"5", b"")]
    assert pair.at_rest()


def test_a_reply_that_waits_has_spent_its_credit_already(pair: Pair) -> None:
    pair.open(credit=3)
    pair.reply(bytes(2 * PIECE_BYTES))
    pair.far.send(Item(1, b"2", 2))
    assert pair.far.served.credit(1) == 0
    with pytest.raises(LocalViolation, match="has credit for 0"):
        pair.far.send(Item(1, b"3", 1))
    assert pair.settle()[0][-1] == (Item(1, b"2", 2), b"")
    assert pair.near.asked.credit(1) == 0


def test_waiting_frames_count_as_queued_bytes(pair: Pair) -> None:
    pair.open()
    pair.reply(bytes(2 * WINDOW_BYTES))
    while pair.far.data_to_send():
        pass
    pair.far.send(Item(1, b"x" * 1000, 1))
    assert pair.far.queued_bytes == 1000
    pair.far.send(Fail(1, "internal", "x"))
    assert pair.far.queued_bytes < 100


def test_a_thousand_replies_with_attachments_take_one_message(pair: Pair) -> None:
    pair.open(credit=2000)
    for number in range(1000):
        pair.reply(b"%d" % number)
    pair.far.send(End(1, b""))
    messages = 0
    while pair.far.ready:
        messages += 1
        received = pair.to_near()
    assert (messages, len(received)) == (1, 1001)


def test_credit_for_an_incomplete_request_is_added_to_it(pair: Pair) -> None:
    pair.ask(bytes(3 * PIECE_BYTES), credit=2)
    assert pair.to_far() == []
    pair.near.send(Credit(1, 5))
    assert pair.settle() == ([], [(Open(1, b"ask", 7, attached=3 * PIECE_BYTES), bytes(3 * PIECE_BYTES))])
    assert pair.far.served.credit(1) == 7


# Early ends -------------------------------------------------------------------------------


def test_a_request_cancelled_before_it_is_complete_is_never_seen(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.to_far()
    pair.near.send(Cancel(1, "left"))
    near, far = pair.settle()
    assert (near, far) == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_a_request_cancelled_before_its_first_piece_is_never_seen(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.near.send(Cancel(1, "left"))
    data = pair.near.data_to_send()
    assert list(map(type, frames(data))) == [Open, Cancel]
    assert receive(pair.far, data) == []
    assert pair.settle() == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_an_incomplete_request_that_fails_sends_no_more_pieces(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.to_far()
    pair.far.send(Fail(1, "internal", "x"))
    pair.to_far()  # crosses the Fail
    near, far = pair.settle()
    assert (near, far) == ([(Fail(1, "internal", "x"), b"")], [])
    assert pair.at_rest()


def test_an_incomplete_reply_that_fails_is_never_seen(pair: Pair) -> None:
    pair.open()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.far.send(Item(1, b"behind", 1))
    pair.to_near()
    pair.far.send(Fail(1, "engine_lost", "x"))
    assert pair.settle()[0] == [(Fail(1, "engine_lost", "x"), b"")]
    assert pair.at_rest()


def test_a_cancel_discards_an_incomplete_reply_at_both_ends(pair: Pair) -> None:
    pair.open()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.to_near()
    pair.near.send(Cancel(1, "left"))
    assert pair.near.statistics().receiving_bytes == 0
    in_flight = pair.far.data_to_send()
    assert pair.to_far() == [(Cancel(1, "left"), b"")]
    assert receive(pair.near, in_flight) == []
    pair.far.send(Item(1, b"more", 1))  # it has not seen the cancel
    assert pair.far.served.credit(1) == 7
    pair.reply(b"and more")
    assert pair.far.data_to_send() == b""
    pair.far.send(Fail(1, "left", "it has let go"))
    assert pair.settle()[0] == [(Fail(1, "left", "it has let go"), b"")]
    assert pair.at_rest()


def test_an_end_behind_a_cancelled_reply_becomes_a_failure(pair: Pair) -> None:
    pair.open()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.near.send(Cancel(1, "left"))
    pair.to_far()
    pair.far.send(End(1, b"whole"))
    assert pair.settle()[0] == [(LEFT, b"")]
    assert pair.at_rest()


def test_a_cancel_of_a_stream_whose_end_waits_is_not_yielded(pair: Pair) -> None:
    pair.open()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.far.send(End(1, b"whole"))
    pair.near.send(Cancel(1, "left"))
    assert pair.settle() == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_a_cancel_that_crosses_the_last_piece_and_the_end_has_no_effect(pair: Pair) -> None:
    pair.open()
    pair.reply(b"all of it")
    pair.far.send(End(1, b"whole"))
    in_flight = pair.far.data_to_send()
    pair.near.send(Cancel(1, "left"))
    assert pair.to_far() == [(Cancel(1, "left"), b"")]
    assert receive(pair.near, in_flight) == [(End(1, b"whole"), b"")]  # the reply is dropped
    pair.settle()
    assert pair.at_rest()


def test_the_window_is_whole_again_after_any_number_of_early_ends(pair: Pair) -> None:
    for _ in range(3 * WINDOW_BYTES // PIECE_BYTES):
        stream = pair.ask(bytes(WINDOW_BYTES))
        pair.to_far()
        pair.near.send(Cancel(stream, "left"))
        pair.settle()
    data = bytes_of(2 * WINDOW_BYTES)
    pair.ask(data)
    assert pair.settle()[1][0][1] == data


# Limits -----------------------------------------------------------------------------------


def test_an_attachment_beyond_the_limit_is_refused_and_changes_nothing() -> None:
    pair = Pair(attached_bytes_max=100)
    with pytest.raises(TooLarge, match="101 bytes are attached; the limit of a link is 100"):
        pair.ask(bytes(101))
    pair.ask(bytes(60))
    with pytest.raises(Overloaded, match="41 bytes are attached, for which there is no room"):
        pair.ask(bytes(41))
    assert pair.near.asked.last == 1
    pair.settle()
    pair.ask(bytes(100))
    assert len(pair.settle()[1]) == 1


# Waiting for room --------------------------------------------------------------------------


def test_a_reply_without_room_is_held_with_what_follows_it_until_there_is_room() -> None:
    pair = Pair(attached_bytes_max=100)
    pair.open()
    pair.open()
    pair.reply(bytes(60))
    pair.reply(bytes_of(40, 1), b"2")
    pair.far.send(Item(2, b"other", 1, 70), views(bytes_of(70, 2)))
    pair.far.send(End(2, b"done"))
    held = pair.far.statistics()
    assert (held.sending_bytes, held.waiting, pair.far.served.credit(2)) == (100, 1, 8)
    pair.far.send(End(1, b"done"))
    received = [(frame.stream, frame.body, data) for frame, data in pair.settle()[0]]
    assert received == [
        (1, b"reply", bytes(60)),
        (1, b"2", bytes_of(40, 1)),
        (1, b"done", b""),
        (2, b"other", bytes_of(70, 2)),
        (2, b"done", b""),
    ]
    assert pair.at_rest()


@pytest.mark.parametrize("early", [Fail(2, "internal", "x"), Cancel(2, "left")], ids=repr)
def test_a_reply_that_ends_while_it_waits_for_room_gives_its_turn_to_the_next(early: Fail | Cancel) -> None:
    pair = Pair(attached_bytes_max=100)
    for _ in range(3):
        pair.open()
    for stream, size in ((1, 60), (2, 100), (3, 40)):
        pair.far.send(Item(stream, b"", 1, size), views(bytes(size)))
    (pair.far if isinstance(early, Fail) else pair.near).send(early)
    if isinstance(early, Cancel):
        list(pair.far.receive_data(pair.near.data_to_send()))
        pair.far.send(Fail(2, "left", "it has let go"))
    assert pair.far.statistics().waiting == 0
    assert [frame.stream for frame, _ in pair.settle()[0] if isinstance(frame, Item)] == [1, 3]
    for stream in (1, 3):
        pair.far.send(End(stream, b""))
    pair.settle()
    assert pair.at_rest()


def test_the_tensors_of_a_reply_are_not_sent_once_its_asker_has_left(pair: Pair) -> None:
    pair.open()
    pair.near.send(Cancel(1, "left"))
    pair.to_far()
    pair.reply(bytes(WINDOW_BYTES))
    pair.far.send(End(1, b"done"))
    assert [type(frame) for frame in frames(pair.far.data_to_send())] == [End]


def test_tokens_do_not_overtake_a_reply_that_waits_for_room() -> None:
    pair = Pair(attached_bytes_max=100)
    pair.open()
    pair.open()
    pair.far.send(Item(2, b"", 1, 100), views(bytes(100)))
    pair.reply(b"waits")
    assert [pair.far.takes_steps(stream) for stream in (1, 2)] == [False, False]
    pair.far.send(Item(1, b"token", 1))
    pair.settle()
    assert [pair.far.takes_steps(stream) for stream in (1, 2)] == [True, True]


def test_a_sender_keeps_to_the_limit_that_its_receiver_states() -> None:
    small, large = Peer("small", serves_max=4, attached_bytes_max=50), Peer("large", serves_max=4)
    for one, other in ((small, large), (large, small)):
        receive(one, other.data_to_send())
    with pytest.raises(TooLarge, match="the limit of a link is 50"):
        large.send(Open(1, b"", 1, attached=51), views(bytes(51)))
    small.send(Open(1, b"", 1, attached=51), views(bytes(51)))
    with pytest.raises(PeerViolation, match="takes -1 attached bytes"):
        receive(Peer("here", serves_max=1), encode(Hello(VERSION, "there", 1, attached_bytes_max=-1)))


# Violations -------------------------------------------------------------------------


def test_an_announced_size_takes_no_memory() -> None:
    peer, received = facing(Open(1, b"", 0, attached=ATTACHED_BYTES_MAX))
    assert received == []
    assert peer.statistics().buffered_bytes == 0


def test_more_than_the_receiver_holds_is_a_violation() -> None:
    with pytest.raises(PeerViolation, match="61 attached bytes, and 40 of others; the limit is 100"):
        facing(Open(1, b"", 0, attached=40), Open(2, b"", 0, attached=61), attached_bytes_max=100)


def test_more_bytes_in_flight_than_the_window_are_a_violation() -> None:
    piece = bytes(PIECE_BYTES)
    window: list[Frame] = [Open(1, b"", 0, attached=1 << 20), *[RequestData(1, piece)] * 4]
    facing(*window)
    with pytest.raises(PeerViolation, match="327680 attached bytes on their way; the limit is 262144"):
        facing(*window, RequestData(1, piece))
    with pytest.raises(PeerViolation, match="on their way"):
        facing(window[0], RequestData(1, bytes(WINDOW_BYTES + 1)))


def test_attachments_of_a_cancelled_stream_are_not_kept() -> None:
    peer, _ = asking()
    peer.send(Cancel(1, "left"))
    assert receive(peer, encode(Item(1, b"", 1, 1 << 29)) + encode(ReplyData(1, b"ab"))) == []
    assert peer.statistics().receiving_bytes == 0
    assert frames(peer.data_to_send())[-1] == WindowUpdate(2)
