"""Frames are decoded as they were encoded, however the bytes are cut; invalid bytes are violations and nothing worse."""

from __future__ import annotations

import builtins
import collections.abc
import struct
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from protocol import errors
from protocol.errors import ERRORS_BY_CODE, InternalError, PeerViolation, RequestError, from_code
from protocol.link import codec
from protocol.link.frames import (
    ATTACHED_BYTES_MAX,
    FRAME_BYTES_MAX,
    KINDS,
    VERSION,
    Announce,
    Begun,
    Bye,
    Cancel,
    Credit,
    End,
    Ended,
    Fail,
    Frame,
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
from protocol.link.peer import Peer
from protocol.messages.generation import FinishReason
from protocol.messages.kind import Message
from protocol.tensors import BYTES, Dtype, Tensor, check_tensor
from protocol.token_ids import IDS_MAX, TokenIds
from protocol.trace import Trace

fast = settings(max_examples=60, deadline=None)

numbers = st.integers(-(2**63), 2**64 - 1)
small = st.integers(0, 2**31)
words = st.text(max_size=20)
blobs = st.binary(max_size=64)
ends = st.builds(Ended, small, st.sampled_from(FinishReason), small, small, small, st.none() | words | numbers)
frames = st.one_of(
    st.builds(Hello, small, words, small),
    st.builds(Open, small, blobs, small, words, st.none() | small, st.just(0) | small),
    st.builds(Credit, small, small),
    st.builds(Cancel, small, words),
    st.builds(Item, small, blobs, small, st.just(0) | small),
    st.builds(RequestData, small, blobs),
    st.builds(ReplyData, small, blobs),
    st.builds(WindowUpdate, small),
    st.builds(KeepAlive),
    st.builds(Announce, blobs),
    st.builds(
        Step,
        st.lists(small, max_size=4),
        st.lists(small, max_size=4),
        st.lists(small, max_size=9),
        st.lists(st.builds(Begun, small, small), max_size=2),
        st.lists(ends, max_size=2),
    ),
    st.builds(End, small, blobs),
    st.builds(Fail, small, words, words, st.none() | words),
    st.builds(Bye, words, words),
)


def head(kind: int, length: int) -> bytes:
    return struct.pack("<BI", kind, length)


def raw(kind: int, body: Mapping[Any, Any] | None) -> bytes:
    data = msgspec.msgpack.encode(body)
    return head(kind, len(data)) + data


def pieces(data: bytes, cuts: list[Any]) -> Iterator[bytes]:
    start = 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        yield data[start:cut]
        start = cut


# Valid bytes -----------------------------------------------------------------------------


@fast
@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 10**6), max_size=8))
def test_frames_arrive_as_they_were_sent_however_they_are_cut(sent: list[Any], cuts: list[Any]) -> None:
    reader, data = FrameReader(), b"".join(map(encode, sent))
    assert [frame for piece in pieces(data, cuts) for frame in reader.feed(piece)] == sent


tensors = st.builds(
    lambda dtype, size: Tensor(dtype, (size,), memoryview(bytes(range(size * BYTES[dtype])))),
    st.sampled_from(Dtype),
    st.integers(0, 9),
)


def hexadecimal(digits: int) -> st.SearchStrategy[Any]:
    return st.integers(1, 16**digits - 1).map(lambda number: f"{number:0{digits}x}")


spans = hexadecimal(16)
traces = st.builds(Trace, hexadecimal(32), spans, st.none() | spans, st.booleans(), st.just("a=b"))
ids = st.lists(st.integers(0, IDS_MAX - 1), max_size=3).map(TokenIds.of)
MADE = {Tensor: tensors, Trace: traces, TokenIds: ids}


def values_of(hint: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911  # one kind of hint each
    """Return a strategy for the values of a field of a message."""
    if hint in MADE:
        return MADE[hint]
    if attrs.has(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in hint.__attrs_attrs__})
    inner = [values_of(each) for each in get_args(hint) if each is not ...]
    match get_origin(hint) or hint:
        case _ if hint in PLAIN:
            return PLAIN[hint]
        case builtins.list | collections.abc.Sequence:
            return st.lists(*inner, max_size=3)
        case builtins.tuple if ... in get_args(hint):
            return st.lists(*inner, max_size=3).map(tuple)
        case builtins.tuple:
            return st.tuples(*inner)
        case builtins.dict:
            return st.dictionaries(*inner, max_size=3)
        case typing.Literal:
            return st.sampled_from(get_args(hint))
        case types.UnionType | typing.Union:
            return st.one_of(inner)
        case _:
            return st.sampled_from(hint)  # an enumeration


PLAIN = {
    int: numbers,
    str: words,
    bytes: blobs,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    object: st.none() | st.booleans() | words | st.lists(words, max_size=2),  # any JSON
}


@pytest.mark.parametrize("kind", codec.KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_message_is_decoded_as_it_was_encoded(kind: type[Message]) -> None:
    @settings(max_examples=15, deadline=None)
    @given(values_of(kind))
    def check(message: Message) -> None:
        attachment = memoryview(b"".join(codec.attached(message)))
        assert codec.decode(codec.encode(message), attachment) == message

    check()


def test_a_frame_of_exactly_the_limit_is_read() -> None:
    frame = Item(1, b"x" * 50, 1)
    size = len(encode(frame)) - 5
    assert list(FrameReader(size).feed(encode(frame))) == [frame]
    with pytest.raises(PeerViolation, match=f"a frame of {size} bytes; the limit is {size - 1}"):
        list(FrameReader(size - 1).feed(encode(frame)))


def test_complete_frames_are_yielded_before_a_later_one_is_found_invalid() -> None:
    stream = FrameReader().feed(encode(Credit(1, 1)) + b"\xff" * 5)
    assert next(stream) == Credit(1, 1)
    with pytest.raises(PeerViolation):
        next(stream)


# Invalid bytes ---------------------------------------------------------------------------


def check_violation_at_most(data: bytes, *, greeted: bool = True) -> None:
    """Let one end of a link receive any bytes: it raises `PeerViolation` or nothing."""
    peer = Peer("here", serves_max=2, frame_bytes_max=4096)
    if greeted:
        list(peer.receive_data(encode(Hello(VERSION, "there", 2))))
        peer.send(Open(1, b"x", 2))
        peer.send(Open(2, b"x", 2, attached=3), (memoryview(b"abc"),))
        peer.data_to_send()
    with suppress(PeerViolation):
        for frame in peer.receive_data(data):
            if isinstance(frame, Open | Item | End):
                codec.decode(frame.body, peer.attached)
    peer.data_to_send()


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=60))
def test_random_bodies_raise_a_violation_and_nothing_else(kind: int, body: bytes) -> None:
    check_violation_at_most(head(kind, len(body)) + body)


things = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted({field.name for kind in KINDS.values() for field in kind.__attrs_attrs__}))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.dictionaries(names, things, max_size=7))
def test_well_formed_nonsense_raises_a_violation_and_nothing_else(kind: int, body: dict[Any, Any]) -> None:
    check_violation_at_most(raw(kind, body))


@settings(max_examples=200, deadline=None)
@given(st.lists(frames, max_size=4))
def test_frames_in_any_order_raise_a_violation_and_nothing_else(sent: list[Any]) -> None:
    check_violation_at_most(b"".join(map(encode, sent)))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(codec.KINDS)), st.binary(max_size=40) | things.map(msgspec.msgpack.encode))
def test_random_messages_raise_a_violation_and_nothing_else(kind: int, body: bytes) -> None:
    with suppress(PeerViolation):
        codec.decode(bytes((kind,)) + body)


@fast
@given(st.lists(frames, min_size=1, max_size=3), st.integers(0, 10**6), st.integers(0, 255))
def test_one_wrong_byte_raises_a_violation_at_most(sent: list[Any], place: int, value: int) -> None:
    data = bytearray(b"".join(map(encode, sent)))
    data[place % len(data)] = value
    check_violation_at_most(bytes(data))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xa3\xff\xfe\xfd", id="a string that is not UTF-8"),
        pytest.param(b"\x81\xa3\xff\xfe\xfd\x01", id="a key that is not UTF-8"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="more entries than bytes"),
        pytest.param(b"\x81\xa1x" + b"\x91" * 3000, id="nested lists"),
        pytest.param(b"\x81\xa1x" * 1000, id="nested maps"),
        pytest.param(b"\xc1", id="no type"),
        pytest.param(b"\xd6\xff\x00\x00\x00\x00", id="a timestamp"),
    ],
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_malformed_msgpack_is_a_violation(kind: int, body: bytes) -> None:
    without_fields = not KINDS[kind].__attrs_attrs__
    # Keys other than the fields of a frame are skipped without being decoded.
    with suppress(PeerViolation) if without_fields else pytest.raises(PeerViolation):
        list(FrameReader().feed(head(kind, len(body)) + body))
    with suppress(PeerViolation):
        codec.decode(bytes((kind,)) + body)


def greeted_peer() -> Peer:
    peer = Peer("here", serves_max=2)
    list(peer.receive_data(encode(Hello(VERSION, "there", 2))))
    peer.send(Open(1, b"x", 2))
    return peer


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (encode(Hello(VERSION, "again", 1)), "a second Hello"),
        (head(max(KINDS) + 1, 0), f"no frame is of kind {max(KINDS) + 1}"),
        (head(1, FRAME_BYTES_MAX + 1), "the limit is"),
        (head(5, 0), "cannot be read"),
        (raw(5, {"stream": "1", "body": b"", "units": 1}), "cannot be read"),
        (raw(3, None), "cannot be read"),
        (encode(Item(1, b"", 3)), "a reply of 3 units on stream 1, which has credit for 2"),
        (encode(Item(2, b"", 0)), "Item on stream 2, which is new"),
        (encode(End(1, b"")) + encode(Item(1, b"", 0)), "Item on stream 1, which is closed"),
        (encode(Credit(1, 1)), "Credit on stream 1, which is new"),
        (encode(Open(2, b"", 0)), "stream 2 opened after stream 0"),
        (encode(Open(1, b"", -1)), "was granted -1 units"),
        (encode(Open(1, b"", 0, attached=-1)), "-1 bytes are attached on stream 1"),
        (encode(Open(1, b"", 0, attached=ATTACHED_BYTES_MAX + 1)), f"the limit is {ATTACHED_BYTES_MAX}"),
        (encode(Item(1, b"", 0, ATTACHED_BYTES_MAX + 1)), f"the limit is {ATTACHED_BYTES_MAX}"),
        (encode(RequestData(1, b"x")), "RequestData on stream 1, which is new"),
        (encode(ReplyData(1, b"x")), "1 attached bytes on stream 1, which has 0 to come"),
        (encode(WindowUpdate(1)), "room for 1 attached bytes, of 0 on their way"),
        (encode(Step([1], [1], [], [], [])), "the arrays of a Step do not fit"),
        (encode(Step([1], [3], [1, 2, 3], [], [])), "credit for 2"),
    ],
)
def test_each_violation_has_its_own_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(PeerViolation, match=sentence):
        list(greeted_peer().receive_data(data))


@pytest.mark.parametrize(
    "frame",
    [
        Open(1, b"", 0),
        KeepAlive(),
    ],
)
def test_a_frame_before_hello_is_a_violation(frame: Frame) -> None:
    with pytest.raises(PeerViolation, match=f"{type(frame).__name__} before Hello"):
        list(Peer("here", serves_max=2).receive_data(encode(frame)))


def test_another_version_is_a_violation_that_names_both() -> None:
    with pytest.raises(PeerViolation, match=f"speaks version {VERSION + 1} of the protocol, this one {VERSION}"):
        list(Peer("here", serves_max=2).receive_data(encode(Hello(VERSION + 1, "there", 2))))


@pytest.mark.parametrize("data", [b"", b"\x00", bytes((max(codec.KINDS) + 1,)), b"\xff\x80"])
def test_a_message_of_no_kind_is_a_violation(data: bytes) -> None:
    with pytest.raises(PeerViolation, match="no message is of kind"):
        codec.decode(data)


# Tensors ----------------------------------------------------------------------------------


@fast
@given(st.sampled_from(Dtype), st.lists(st.integers(0, 4), max_size=3))
def test_a_tensor_has_exactly_the_bytes_of_its_shape(dtype: Dtype, shape: list[Any]) -> None:
    size = BYTES[dtype]
    for length in shape:
        size *= length
    tensor = Tensor(dtype, tuple(shape), memoryview(bytes(size)))
    assert check_tensor(tensor) is tensor
    with pytest.raises(PeerViolation, match="bytes, not"):
        check_tensor(Tensor(dtype, tuple(shape), memoryview(bytes(size + 1))))
    if size:
        with pytest.raises(PeerViolation):
            check_tensor(Tensor(dtype, tuple(shape), memoryview(bytes(size - 1))))


def test_a_negative_size_in_a_shape_is_a_violation() -> None:
    with pytest.raises(PeerViolation, match="negative"):
        check_tensor(Tensor(Dtype.UINT8, (-2, -2), memoryview(b"1234")))


def test_a_tensor_does_not_print_its_bytes() -> None:
    data: Any = b"xxxx"  # whose own `repr` would show them
    assert "xxxx" not in repr(Tensor(Dtype.UINT8, (4,), data))


# Errors -----------------------------------------------------------------------------

CLASSES = [thing for thing in vars(errors).values() if isinstance(thing, type)]
NAMED = [cls for cls in CLASSES if issubclass(cls, RequestError) and cls is not RequestError]
by_name = pytest.mark.parametrize("cls", NAMED, ids=lambda cls: cls.__name__)


def test_every_code_belongs_to_one_error_alone() -> None:
    assert len({cls.code for cls in NAMED}) == len(NAMED) == len(ERRORS_BY_CODE)


@by_name
def test_an_error_is_rebuilt_from_its_code(cls: type[RequestError]) -> None:
    error = from_code(cls.code, "it failed", "max_tokens")
    assert (type(error), str(error), error.param) == (cls, "it failed", "max_tokens")


def test_an_unknown_code_is_internal() -> None:
    assert type(from_code("from_the_future", "x")) is InternalError


@by_name
def test_a_status_in_the_400s_means_a_fault_of_the_client(cls: type[RequestError]) -> None:
    assert (400 <= cls.http_status < 500) == (cls.fault == "client")
    assert cls.http_status in {*range(400, 500), 500, 503}


@by_name
def test_retry_after_is_set_for_429_and_503_alone(cls: type[RequestError]) -> None:
    assert (cls.retry_after_s is not None) == (cls.http_status in {429, 503})
    assert cls.retry_after_s is None or cls.retry_after_s > 0
