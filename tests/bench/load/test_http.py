"""Bytes may be cut anywhere; the same events come of them. What is no protocol fails alone."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto import ConnectionType
from wsproto.connection import Connection
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

from bench.load.http import Chunked, Event, EventStream, HttpDialogue
from bench.load.messages import Fault, RequestFailed
from bench.load.websocket import CLOSE, PING, PONG, TEXT, Frames, SocketDialogue, frame

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in pairwise(bounds) if a < b]


def failure(feed: Callable[[bytes], bytes | Sequence[Event | tuple[int, bytes]]], *data: bytes) -> Fault:
    with pytest.raises(RequestFailed) as caught:
        for piece in data:
            feed(piece)
    return caught.value.fault


def http() -> HttpDialogue:
    dialogue = HttpDialogue(b"host", b"/v1/chat/completions", [])
    dialogue.begin(b"{}")
    return dialogue


cuts = st.lists(st.integers(0, 10_000), max_size=40)
odd_stream = (
    b"\xef\xbb\xbfdata: marked\r\n: a comment\r\n\r\nevent: greeting\r\nid: 3\r\nretry: 5\r\ndata: {\r\ndata:  1}\r\n\r\n"
    b"data:tight\n\n\n\n: ping\n\nevent: nothing\n\ndata: after\r\rdata: a\rdata: b\r\rdata\n\ndata: [DONE]\n\n"
)
ODD_EVENTS = [
    (b"", b"marked"),
    (b"greeting", b"{\n 1}"),
    (b"", b"tight"),
    (b"", b"after"),
    (b"", b"a\nb"),
    (b"", b"[DONE]"),
]


@given(cuts)
def test_events_are_the_same_wherever_their_bytes_are_cut(places: list[int]) -> None:
    stream = EventStream()
    assert [event for part in cut(odd_stream, places) for event in stream.feed(part)] == ODD_EVENTS


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.http.EVENT_BYTES_MAX", 100)
    assert failure(EventStream().feed, b"data: " + b"x" * 200).kind == "shape"
    assert failure(EventStream().feed, *[b"data: xxxxxxxxxx\n"] * 20).kind == "shape"


# HTTP -------------------------------------------------------------------------------------

bodies = st.lists(st.binary(min_size=1, max_size=30), max_size=6)


@given(bodies, cuts, st.sampled_from([b"", b";a=b", b" "]), st.booleans())
def test_chunks_give_their_bodies_wherever_they_are_cut(
    parts: list[bytes], places: list[int], extension: bytes, trailer: bool
) -> None:
    data = b"".join(b"%X%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    data += b"0\r\n" + (b"x: y\r\n" if trailer else b"") + b"\r\n"
    body = Chunked()
    assert b"".join(body.feed(part) for part in cut(data, places)) == b"".join(parts)
    assert body.done


@pytest.mark.parametrize("data", [b"zz\r\n", b"-1\r\n", b"\r\n", b"+5\r\n", b"1_0\r\n", b"1\r\nab\r\n", b"1" * 9000])
def test_an_invalid_chunk_is_refused(data: bytes) -> None:
    assert failure(Chunked().feed, data).kind == "shape"


@given(cuts, st.booleans(), st.booleans())
def test_an_answer_is_the_same_wherever_its_bytes_are_cut(places: list[int], chunked: bool, informed: bool) -> None:
    body = odd_stream
    head = b"HTTP/1.1 100 Continue\r\n\r\n" if informed else b""
    data = head + (CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else UNTIL_CLOSED + body)
    dialogue = http()
    events = [event for part in cut(data, places) for event in dialogue.feed(part)]
    if not chunked:
        assert not dialogue.finished
        events += dialogue.feed(b"")
    assert events == ODD_EVENTS
    assert dialogue.finished
    assert dialogue.reusable is chunked


@pytest.mark.parametrize(
    ("data", "kind", "code"),
    [
        ([b""], "connection", "closed"),
        ([b"HTTP/1.1 200 OK\r\nconten", b""], "connection", "closed"),
        ([CHUNKED, b""], "truncated", "closed"),
        ([CHUNKED + b"8\r\ndata: x\n", b""], "truncated", "closed"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\ndata: x\n\n", b""], "truncated", "closed"),
        ([b"SSH-2.0-OpenSSH_9.7\r\n\r\n"], "shape", "not HTTP"),
        (
            [b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"],
            "shape",
            "not a stream",
        ),
        ([b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy"], "http", "503"),
        ([b'HTTP/1.1 429 No\r\ncontent-length: 27\r\n\r\n{"error":{"code":"slowly"}}'], "http", "429 slowly"),
        ([b'HTTP/1.1 400 No\r\ncontent-length: 26\r\n\r\n{"error":{"type":"wrong"}}'], "http", "400 wrong"),
        ([b'HTTP/1.1 500 No\r\n\r\n{"error":"all is lost"}', b""], "http", "500"),
        ([b"HTTP/1.1 204 No\r\n\r\n"], "http", "204"),
        ([b"HTTP/1.1 302 Go\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"], "http", "302"),
    ],
)
def test_each_failure_has_its_kind_and_code(data: list[bytes], kind: str, code: str) -> None:
    fault = failure(http().feed, *data)
    assert (fault.kind, fault.code) == (kind, code)


# WebSocket --------------------------------------------------------------------------------

messages: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(
        st.tuples(st.just(TEXT), st.text(max_size=400)),
        st.tuples(st.just(PING), st.binary(max_size=20)),
    ),
    max_size=6,
)


@given(messages, cuts)
def test_frames_of_another_library_are_read_wherever_they_are_cut(
    sent: list[tuple[int, Any]], places: list[int]
) -> None:
    server, data, wanted = Connection(ConnectionType.SERVER), b"", []
    for opcode, payload in sent:
        if opcode == PING:
            data += server.send(Ping(payload=payload))
            wanted.append((PING, bytes(payload)))
            continue
        data += server.send(TextMessage(payload))
        wanted.append((TEXT, payload.encode()))
    data += server.send(CloseConnection(1012, "soon"))
    frames = Frames()
    found = [message for part in cut(data, places) for message in frames.feed(part)]
    assert found == [*wanted, (CLOSE, b"\x03\xf4soon")]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 70_000])
def test_another_library_reads_our_frames(size: int) -> None:
    server = Connection(ConnectionType.SERVER)
    server.receive_data(frame(TEXT, b"x" * size, b"\x01\x02\xf3\xff"))
    assert "".join(each.data for each in server.events()) == "x" * size  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\x81abcdx",  # masked
        b"\xc1\x01x",  # compressed, which nobody agreed on
        b"\x80\x01x",  # goes on without a beginning
        b"\x01\x01x\x81\x01y",  # begins within another
        b"\x09\x01x",  # a ping in parts
        b"\x83\x00",  # an opcode that nobody knows
        b"\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff",  # absurdly long
    ],
)
def test_an_invalid_frame_is_refused(data: bytes) -> None:
    assert failure(Frames().feed, data).kind == "shape"


def opened() -> SocketDialogue:
    dialogue = SocketDialogue(b"host", b"/v1/responses", [])
    dialogue.hello()
    dialogue.ready = True
    return dialogue


def text(body: object) -> bytes:
    return Connection(ConnectionType.SERVER).send(TextMessage(json.dumps(body)))


CLOSED = Connection(ConnectionType.SERVER).send(CloseConnection(1012, "soon"))


def test_a_close_before_the_answer_is_no_truncation_and_one_within_it_is() -> None:
    dialogue = opened()
    assert (failure(dialogue.feed, CLOSED).kind, dialogue.reusable) == ("connection", False)
    dialogue = opened()
    assert dialogue.feed(text({})) == [(b"", b"{}")]
    fault = failure(dialogue.feed, CLOSED)
    assert (fault.kind, fault.code, fault.detail) == ("truncated", "ws close 1012", "soon")


def test_events_that_come_with_a_close_are_read_before_it() -> None:
    dialogue = opened()
    assert dialogue.feed(text({"a": 1}) + CLOSED) == [(b"", b'{"a": 1}')]
    assert dialogue.closed is not None
    assert dialogue.closed.fault.code == failure(dialogue.feed, b"").code == "ws close 1012"


def test_an_end_without_a_close_and_binary_messages_are_faults() -> None:
    assert failure(opened().feed, b"").code == "closed"
    assert failure(opened().feed, Connection(ConnectionType.SERVER).send(BytesMessage(b"x"))).code == "a binary message"
    assert opened().feed(Connection(ConnectionType.SERVER).send(Ping()).replace(b"\x89", bytes([0x80 | PONG]))) == []


@given(cuts)
def test_a_refused_upgrade_is_an_http_fault_wherever_it_is_cut(places: list[int]) -> None:
    dialogue = SocketDialogue(b"host", b"/v1/responses", [])
    dialogue.hello()
    body = b'{"error":{"code":"overloaded","message":"later"}}'
    data = b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    fault = failure(dialogue.feed, *cut(data, places))
    assert (fault.kind, fault.code, fault.detail) == ("http", "503 overloaded", "later")


@given(st.binary(max_size=60), cuts)
def test_arbitrary_bytes_raise_nothing_but_a_failure(data: bytes, places: list[int]) -> None:
    for feed in (http().feed, opened().feed, Frames().feed, Chunked().feed, EventStream().feed):
        with suppress(RequestFailed):
            for part in cut(data, places):
                assert isinstance(feed(part), list | bytes)
