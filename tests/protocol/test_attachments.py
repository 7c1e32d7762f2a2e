"""Long bodies in pieces: nobody waits behind them, they arrive whole, and a stream that ends early leaves nothing."""

from __future__ import annotations

import pytest

from protocol import attachments
from protocol.attachments import PIECE_BYTES, WINDOW_BYTES
from protocol.errors import LocalViolation, Overloaded, PeerViolation, TooLarge
from protocol.frames import (
    VERSION,
    Announce,
    Cancel,
    Credit,
    End,
    Ended,
    Fail,
    FrameReader,
    Hello,
    Item,
    KeepAlive,
    Open,
    ReplyData,
    RequestData,
    Step,
    WindowUpdate,
    encode,
)
from protocol.messages import FinishReason
from protocol.peer import Peer
from tests.protocol.test_streams import keeps_nothing

LEFT = Fail(1, "left", "the asker left")


def bytes_of(size: int, seed: int = 0):
    return (bytes(range(seed, 256)) * (size // (256 - seed) + 1))[:size]


def views(*data):
    return tuple(map(memoryview, data))


class Pair:
    """Two ends that have greeted each other: `near` asks and `far` answers."""

    def __init__(self, *, streams: int = 4, **fields: int) -> None:
        self.near, self.far = Peer("near", serves_max=0, **fields), Peer("far", serves_max=streams, **fields)
        self.to_near(), self.to_far()

    def to_far(self):
        """Carry one message to the far end, and return what it yields, with what was attached."""
        return hear(self.far, self.near.data_to_send())

    def to_near(self):
        return hear(self.near, self.far.data_to_send())

    def settle(self):
        """Carry everything, and return what either end yields in the end."""
        heard = [], []
        while self.near.ready or self.far.ready:
            heard[0].extend(self.to_near())
            heard[1].extend(self.to_far())
        return heard

    def ask(self, data: bytes = b"", credit: int = 9) -> int:
        stream = self.near.asked.last + 1
        self.near.send(Open(stream, b"ask", credit, attached=len(data)), views(data) if data else ())
        return stream

    def reply(self, data: bytes, body: bytes = b"reply", units: int = 1) -> None:
        self.far.send(Item(1, body, units, len(data)), views(data))

    def at_rest(self) -> bool:
        assert len(self.near.asked) == len(self.far.served) == 0
        assert not self.near.asked.owing
        assert not self.far.served.owing
        keeps_nothing(self.near)
        keeps_nothing(self.far)
        return True


@pytest.fixture
def pair() -> Pair:
    return Pair()


def hear(peer, data):
    return [(frame, bytes(peer.attached)) for frame in peer.receive_data(data)]


def frames(data):
    return list(FrameReader().feed(data))


def facing(*said: object, streams: int = 4, **fields):
    """An end that serves, and has heard what a hand-written asker says."""
    peer = Peer("here", serves_max=streams, **fields)
    heard = hear(peer, b"".join(map(encode, (Hello(VERSION, "there", streams), *said))))[1:]
    peer.data_to_send()
    return peer, heard


def asking(*said: object, **fields):
    """An end that has asked once, and has heard what a hand-written answerer says."""
    peer, _ = facing(**fields)
    peer.send(Open(1, b"", 9))
    peer.data_to_send()
    return peer, hear(peer, b"".join(map(encode, said)))


# Whole and equal --------------------------------------------------------------------------


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


def test_several_buffers_are_one_attachment(pair: Pair) -> None:
    parts = [bytes_of(PIECE_BYTES - 3), b"", b"ab", bytes_of(PIECE_BYTES, 7), b"c"]
    pair.near.send(Open(1, b"", 1, attached=sum(map(len, parts))), views(*parts))
    assert pair.settle()[1][0][1] == b"".join(parts)


def test_small_buffers_leave_together(pair: Pair) -> None:
    pair.near.send(Open(1, b"", 1, attached=3000), views(*[b"abc"] * 1000))
    assert [type(frame) for frame in frames(pair.near.data_to_send())] == [Open, RequestData]


def test_buffers_of_other_shapes_are_their_bytes(pair: Pair) -> None:
    grid = memoryview(bytes_of(64)).cast("f", (4, 4))
    pair.near.send(Open(1, b"", 1, attached=64), (grid,))
    assert pair.settle()[1][0][1] == bytes_of(64)


def test_what_was_attached_is_gone_when_its_frame_has_been_heard(pair: Pair) -> None:
    pair.ask(b"abc")
    receiving = pair.far.receive_data(pair.near.data_to_send())
    next(receiving)
    assert bytes(pair.far.attached) == b"abc"
    assert pair.far.attached.readonly
    receiving.close()  # type: ignore[attr-defined]  # as when its consumer raises
    assert not pair.far.attached


# Nobody waits behind it -------------------------------------------------------------------


def test_a_frame_leaves_with_the_next_message_while_100_mb_wait(pair: Pair) -> None:
    pair.ask(bytes(100 * 1024 * 1024))
    pair.near.data_to_send()
    pair.near.send(Announce(b"x"))
    first, *rest = frames(pair.near.data_to_send())
    assert first == Announce(b"x")
    assert [len(frame.data) for frame in rest] == [PIECE_BYTES]


def test_no_message_has_more_than_one_piece_and_no_more_than_the_window_is_on_its_way(pair: Pair) -> None:
    pair.ask(bytes(100 * 1024 * 1024))
    sizes = []
    while data := pair.near.data_to_send():
        sizes.append(sum(len(frame.data) for frame in frames(data) if isinstance(frame, RequestData)))
    assert max(sizes) == PIECE_BYTES
    assert sum(sizes) == WINDOW_BYTES
    assert not pair.near.ready
    pair.near.send(Announce(b"x"))  # a window that is full stops nothing else
    assert frames(pair.near.data_to_send()) == [Announce(b"x")]


def test_room_lets_as_much_more_leave_as_it_says(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    while pair.near.data_to_send():
        pass
    list(pair.near.receive_data(encode(WindowUpdate(5))))
    assert pair.near.ready
    assert frames(pair.near.data_to_send()) == [RequestData(1, bytes(5))]
    assert pair.near.data_to_send() == b""


def test_what_has_come_is_given_back_at_once_and_in_one_frame(pair: Pair) -> None:
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
        hear(pair.far, data)
        pair.to_near()
    assert turns == [1, 2, 3, 1, 2, 3]


def test_a_short_body_passes_a_long_one(pair: Pair) -> None:
    pair.ask(bytes(100 * 1024 * 1024))
    pair.ask(b"short")
    pair.to_far()
    assert pair.to_far() == [(Open(2, b"ask", 9, attached=5), b"short")]


# The order within a stream ----------------------------------------------------------------


def test_what_a_stream_says_after_it_waits_behind_it(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    big, bigger = bytes_of(3 * PIECE_BYTES), bytes_of(4 * PIECE_BYTES, 1)
    pair.reply(big, b"1")
    pair.far.send(Item(1, b"2", 1))
    pair.reply(bigger, b"3")
    pair.far.send(Item(1, b"4", 1))
    pair.far.send(End(1, b"5"))
    heard = [(frame.body, data) for frame, data in pair.settle()[0]]
    assert heard == [(b"1", big), (b"2", b""), (b"3", bigger), (b"4", b""), (b"5", b"")]
    assert pair.at_rest()


def test_a_reply_that_waits_has_spent_its_credit_already(pair: Pair) -> None:
    pair.ask(credit=3)
    pair.settle()
    pair.reply(bytes(2 * PIECE_BYTES))
    pair.far.send(Item(1, b"2", 2))
    assert pair.far.served.credit(1) == 0
    with pytest.raises(LocalViolation, match="has credit for 0"):
        pair.far.send(Item(1, b"3", 1))
    assert pair.settle()[0][-1] == (Item(1, b"2", 2), b"")
    assert pair.near.asked.credit(1) == 0


@pytest.mark.parametrize("frame", [Item(1, b"", 0), End(1, b""), Fail(1, "internal", "x")], ids=repr)
def test_nothing_follows_an_end_that_waits(pair: Pair, frame: Item | End | Fail) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * PIECE_BYTES))
    pair.far.send(End(1, b""))
    with pytest.raises(LocalViolation, match="on stream 1, which has ended"):
        pair.far.send(frame)
    assert [type(frame) for frame, _ in pair.settle()[0]] == [Item, End]
    assert pair.at_rest()


def test_a_step_does_not_wait_and_is_refused_where_it_would_have_to(pair: Pair) -> None:
    pair.ask(credit=3)
    pair.settle()
    pair.reply(bytes(2 * PIECE_BYTES))
    with pytest.raises(LocalViolation, match="before 131072 bytes that were to come first"):
        pair.far.send(Step([1], [1], [7], [], []))
    assert pair.far.served.credit(1) == 2


def test_frames_that_wait_are_counted_with_those_that_are_queued(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * WINDOW_BYTES))
    while pair.far.data_to_send():
        pass
    pair.far.send(Item(1, b"x" * 1000, 1))
    assert pair.far.queued_bytes == 1000
    pair.far.send(Fail(1, "internal", "x"))
    assert pair.far.queued_bytes < 100


def test_a_thousand_replies_with_something_attached_to_each_are_linear_work(pair: Pair) -> None:
    pair.ask(credit=2000)
    pair.settle()
    for number in range(1000):
        pair.reply(b"%d" % number)
    pair.far.send(End(1, b""))
    messages = 0
    while pair.far.ready:
        messages += 1
        heard = pair.to_near()
    assert (messages, len(heard)) == (1, 1001)


def test_credit_for_a_request_that_is_not_whole_is_in_its_credit_when_it_is(pair: Pair) -> None:
    pair.ask(bytes(3 * PIECE_BYTES), credit=2)
    assert pair.to_far() == []
    pair.near.send(Credit(1, 5))
    assert pair.settle() == ([], [(Open(1, b"ask", 7, attached=3 * PIECE_BYTES), bytes(3 * PIECE_BYTES))])
    assert pair.far.served.credit(1) == 7


# Early ends -------------------------------------------------------------------------------


def test_a_request_that_is_left_before_it_is_whole_was_never_asked(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.to_far()
    pair.near.send(Cancel(1, "left"))
    near, far = pair.settle()
    assert (near, far) == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_a_request_that_is_left_before_anything_has_left(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.near.send(Cancel(1, "left"))
    data = pair.near.data_to_send()
    assert list(map(type, frames(data))) == [Open, Cancel]
    assert hear(pair.far, data) == []
    assert pair.settle() == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_a_request_that_fails_before_it_is_whole_sends_no_more(pair: Pair) -> None:
    pair.ask(bytes(2 * WINDOW_BYTES))
    pair.to_far()
    pair.far.send(Fail(1, "internal", "x"))  # whoever knows of it, and wherever from
    pair.to_far()  # crosses the Fail
    near, far = pair.settle()
    assert (near, far) == ([(Fail(1, "internal", "x"), b"")], [])
    assert pair.at_rest()


def test_a_reply_that_fails_before_it_is_whole_is_no_reply(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.far.send(Item(1, b"behind", 1))
    pair.to_near()
    pair.far.send(Fail(1, "engine_lost", "x"))
    assert pair.settle()[0] == [(Fail(1, "engine_lost", "x"), b"")]
    assert pair.at_rest()


def test_an_asker_that_leaves_keeps_nothing_of_a_reply_and_its_answerer_sends_no_more(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.to_near()
    pair.near.send(Cancel(1, "left"))
    assert pair.near._incoming._bytes == 0
    in_flight = pair.far.data_to_send()
    assert pair.to_far() == [(Cancel(1, "left"), b"")]
    assert hear(pair.near, in_flight) == []
    pair.far.send(Item(1, b"more", 1))  # it does not know, and need not
    assert pair.far.served.credit(1) == 7
    pair.reply(b"and more")
    assert pair.far.data_to_send() == b""
    pair.far.send(Fail(1, "left", "it has let go"))
    assert pair.settle()[0] == [(Fail(1, "left", "it has let go"), b"")]
    assert pair.at_rest()


def test_an_end_of_a_reply_that_was_cut_is_no_end(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.near.send(Cancel(1, "left"))
    pair.to_far()
    pair.far.send(End(1, b"whole"))
    assert pair.settle()[0] == [(LEFT, b"")]
    assert pair.at_rest()


def test_an_answerer_that_has_ended_does_not_hear_of_a_cancel(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(bytes(2 * WINDOW_BYTES))
    pair.far.send(End(1, b"whole"))
    pair.near.send(Cancel(1, "left"))
    assert pair.settle() == ([(LEFT, b"")], [])
    assert pair.at_rest()


def test_a_cancel_that_crosses_the_last_piece_and_the_end_means_nothing(pair: Pair) -> None:
    pair.ask()
    pair.settle()
    pair.reply(b"all of it")
    pair.far.send(End(1, b"whole"))
    in_flight = pair.far.data_to_send()
    pair.near.send(Cancel(1, "left"))
    assert pair.to_far() == [(Cancel(1, "left"), b"")]
    assert hear(pair.near, in_flight) == [(End(1, b"whole"), b"")]  # the reply was for nobody
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


def test_more_than_a_link_takes_is_refused_before_anything_has_happened() -> None:
    pair = Pair(attached_bytes_max=100)
    with pytest.raises(TooLarge, match="101 bytes are attached; the limit of a link is 100"):
        pair.ask(bytes(101))
    pair.ask(bytes(60))
    with pytest.raises(Overloaded, match="60 attached bytes are waiting"):
        pair.ask(bytes(41))
    assert pair.near.asked.last == 1
    pair.settle()
    pair.ask(bytes(100))
    assert len(pair.settle()[1]) == 1


def test_replies_that_wait_behind_others_count_too() -> None:
    pair = Pair(attached_bytes_max=100)
    pair.ask()
    pair.settle()
    pair.reply(bytes(60))
    pair.reply(bytes(40))
    with pytest.raises(Overloaded):
        pair.reply(b"x")
    pair.far.send(Fail(1, "overloaded", "x"))
    pair.settle()
    assert pair.at_rest()


@pytest.mark.parametrize(
    ("frame", "data"),
    [
        (Open(1, b"", 1, attached=3), ()),
        (Open(1, b"", 1, attached=3), (b"ab",)),
        (Open(1, b"", 1), (b"ab",)),
        (Open(1, b"", 1, attached=-1), ()),
        (Announce(b""), (b"ab",)),
    ],
    ids=repr,
)
def test_as_many_bytes_are_attached_as_the_frame_says(
    pair: Pair, frame: Open | Announce, data: tuple[bytes, ...]
) -> None:
    with pytest.raises(LocalViolation, match="attached"):
        pair.near.send(frame, views(*data))
    assert pair.near.data_to_send() == b""


# A peer that lies -------------------------------------------------------------------------


def test_to_announce_a_size_costs_the_receiver_nothing() -> None:
    peer, heard = facing(Open(1, b"", 0, attached=attachments.ATTACHED_BYTES_MAX))
    assert heard == []
    ((_, buffer),) = peer._incoming._incomplete.values()
    assert len(buffer) == 0


def test_more_than_the_receiver_holds_is_a_violation() -> None:
    with pytest.raises(PeerViolation, match="61 attached bytes, and 40 of others; the limit is 100"):
        facing(Open(1, b"", 0, attached=40), Open(2, b"", 0, attached=61), attached_bytes_max=100)


def test_a_peer_that_waits_for_no_room_is_found_out() -> None:
    piece = bytes(PIECE_BYTES)
    said = [Open(1, b"", 0, attached=1 << 20), *[RequestData(1, piece)] * 4]
    facing(*said)
    with pytest.raises(PeerViolation, match="327680 attached bytes on their way; the limit is 262144"):
        facing(*said, RequestData(1, piece))
    with pytest.raises(PeerViolation, match="on their way"):
        facing(said[0], RequestData(1, bytes(WINDOW_BYTES + 1)))


def test_bytes_for_a_stream_that_is_closed_are_on_their_way_too() -> None:
    peer, _ = facing(Open(1, b"", 0))
    peer.send(Fail(1, "internal", "x"))
    with pytest.raises(PeerViolation, match="on their way"):
        list(peer.receive_data(encode(RequestData(1, bytes(PIECE_BYTES))) * 5))


@pytest.mark.parametrize("size", [0, -1, 3, 2**63])
def test_no_more_room_is_given_than_was_taken(pair: Pair, size: int) -> None:
    pair.ask(b"ab")
    pair.near.data_to_send()
    with pytest.raises(PeerViolation, match=f"room for {size} attached bytes, of 2 on their way"):
        list(pair.near.receive_data(encode(WindowUpdate(size))))


def test_room_is_not_given_twice(pair: Pair) -> None:
    pair.ask(b"ab")
    pair.to_far()
    room = pair.far.data_to_send()
    list(pair.near.receive_data(room))
    with pytest.raises(PeerViolation, match="of 0 on their way"):
        list(pair.near.receive_data(room))


@pytest.mark.parametrize(
    "lie",
    [
        (Item(1, b"", 1, 5), Item(1, b"", 1)),
        (Item(1, b"", 1, 5), ReplyData(1, b"ab"), End(1, b"")),
        (Item(1, b"", 1, 5), ReplyData(1, b"abcdef")),
        (Item(1, b"", 1, 5), ReplyData(1, b"")),
        (Item(1, b"", 1, 5), Step([1], [1], [7], [], [])),
        (Item(1, b"", 1, 5), Step([], [], [], [], [Ended(1, FinishReason.STOP, 1, 1, 0)])),
        (ReplyData(1, b"a"),),
        (ReplyData(2, b"a"),),
        (RequestData(1, b"a"),),
    ],
    ids=repr,
)
def test_pieces_that_do_not_fit_their_reply_are_a_violation(lie: tuple[object, ...]) -> None:
    with pytest.raises(PeerViolation):
        asking(*lie)


def test_no_answer_comes_before_the_request_has_left(pair: Pair) -> None:
    pair.ask(bytes(2 * PIECE_BYTES))
    pair.near.data_to_send()
    with pytest.raises(PeerViolation, match="before 65536 bytes that were to come first"):
        list(pair.near.receive_data(encode(End(1, b""))))


def test_replies_to_one_who_left_are_not_kept_however_long() -> None:
    peer, _ = asking()
    peer.send(Cancel(1, "left"))
    assert hear(peer, encode(Item(1, b"", 1, 1 << 29)) + encode(ReplyData(1, b"ab"))) == []
    assert peer._incoming._bytes == 0
    assert frames(peer.data_to_send())[-1] == WindowUpdate(2)


def test_a_beat_is_heard_by_nobody() -> None:
    assert facing(KeepAlive())[1] == []


def test_what_is_told_is_heard() -> None:
    assert facing(Announce(b"x"))[1] == [(Announce(b"x"), b"")]
