"""Plain requests give the same events and the same bytes here as through h11."""

from __future__ import annotations

from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.gateway.http import syntax as module
from supervisor.gateway.http.plain_head import Header, RequestHead
from supervisor.gateway.http.syntax import HttpSyntax

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
LATE_MAX = 8
PLAIN = st.builds(lambda body: HEAD % (len(body), b"") + body, st.binary(max_size=40))
OTHER = st.sampled_from(
    [
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        HEAD % (3, b"Expect: 100-continue\r\n") + b"abc",
        HEAD % (3, b"Connection: close\r\n") + b"abc",
        HEAD % (3, b"Upgrade: h2c\r\n") + b"abc",
        HEAD % (3, b"Content-Length: 4\r\n") + b"abc",
        b"POST / HTTP/1.0\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
        HEAD % (10, b"") + b"short",
        b"\r\n",
        b"rubbish\r\n\r\n",
    ]
)
ANSWERS = st.lists(
    st.tuples(
        st.sampled_from([200, 204, 404, 503]),
        st.booleans(),  # with a length
        st.sampled_from([None, b"close", b"upgrade", b"upgrade, close"]),
        st.lists(st.binary(max_size=5), max_size=3),
        st.sampled_from(["ends", "ends", "ends", "fails", "fails at once", "is too short", "is too long"]),
    ),
    min_size=1,
    max_size=4,
)
Answer = tuple[int, bool, bytes | None, list[bytes], str]


def answered(syntax: HttpSyntax, answer: Answer) -> list[object]:
    """Return what is written for an answer, piece by piece, and how it ended."""
    status, sized, connection, pieces, end = answer
    headers: list[Header] = [(b"date", b"today"), (b"content-type", b"text/plain")]
    if sized and status != 204:
        headers.append((b"content-length", b"%d" % (sum(map(len, pieces)) + (end == "is too short"))))
    if connection is not None:
        headers.append((b"connection", connection))
    written: list[object] = [syntax.begun]
    try:
        if end != "fails at once":
            written.append(syntax.send_head(status, headers))
            written.append(syntax.begun)
            body = [b"", *pieces, b"more"] if end == "is too long" else pieces
            written += [syntax.send_data(piece) for piece in body] if status != 204 else []
        if end.startswith("fails"):
            syntax.send_failed()
        else:
            written.append(syntax.send_end())
    except h11.LocalProtocolError:
        written.append("refused")
    return [*written, syntax.begun, syntax.body_unread, syntax.read_failed, syntax.done]


def converse(received: list[bytes], answers: list[Answer], *, late: bytes) -> list[object]:
    """Read pieces and answer each request once it is whole; return every event, and everything that is written.

    `late` is received between each of the first requests and its answer, as a pipelining client sends it.
    """
    syntax, seen, body = HttpSyntax(1024), list[object](), b""
    pending, number = [*received, b""], 0
    try:
        while True:
            event = syntax.next_event()
            if isinstance(event, RequestHead):
                seen += [event.method, event.target, event.headers, event.values, event.http_version]
            elif isinstance(event, h11.Data):
                body += bytes(event.data)  # however it is cut into pieces
            elif isinstance(event, h11.EndOfMessage):
                if late and number < LATE_MAX:  # each is a request, and makes room for another
                    syntax.receive_data(late)
                seen += [body, syntax.trailing_bytes, *answered(syntax, answers[number % len(answers)])]
                body, number = b"", number + 1
                if not syntax.done:
                    return seen
                syntax.start_next_cycle()
            elif event is h11.NEED_DATA and pending:
                if syntax.awaits_continue:
                    seen.append(syntax.send_continue())
                syntax.receive_data(pending.pop(0))
            else:
                return [*seen, str(event), syntax.trailing_bytes]
    except h11.RemoteProtocolError as error:
        seen += [str(error), error.error_status_hint, syntax.read_failed, syntax.body_unread, syntax.begun]
        return [*seen, *answered(syntax, answers[number % len(answers)])]


@given(
    requests=st.lists(PLAIN | PLAIN | OTHER, min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    answers=ANSWERS,
    late=st.sampled_from([b"", b"", HEAD % (2, b"") + b"hi"]),
)
def test_a_connection_is_the_same_with_and_without_plain_requests(
    requests: list[bytes], cuts: list[int], answers: list[Answer], late: bytes
) -> None:
    data = b"".join(requests)
    places = [0, *sorted(place for place in cuts if place < len(data)), len(data)]
    received = [data[start:end] for start, end in pairwise(places) if start < end]
    with pytest.MonkeyPatch.context() as patch:
        ours = converse(received, answers, late=late if len(received) == 1 else b"")
        patch.setattr(module, "read_plain_head", lambda *_: None)
        assert ours == converse(received, answers, late=late if len(received) == 1 else b"")


def one(body: bytes = b"{}") -> HttpSyntax:
    """Return the syntax of a connection over which one plain request has come, and its head been read."""
    syntax = HttpSyntax(1024)
    syntax.receive_data(HEAD % (len(body), b"") + body)
    assert isinstance(syntax.next_event(), RequestHead)
    assert syntax.plain
    return syntax


def test_a_whole_body_is_taken_at_once_and_a_partial_one_is_not() -> None:
    syntax = one(b"whole")
    syntax.receive_data(b"next")
    assert (syntax.take_body(), syntax.trailing_bytes, syntax.body_unread) == (b"whole", b"next", False)
    assert syntax.take_body() is None, "it has been taken"
    partial = HttpSyntax(1024)
    partial.receive_data(HEAD % (5, b"") + b"who")
    assert isinstance(partial.next_event(), RequestHead)
    assert (partial.take_body(), partial.body_unread, partial.trailing_bytes) == (None, True, b"who")


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_a_header_with_a_line_end_in_it_is_never_written(value: bytes) -> None:
    for syntax in (one(), HttpSyntax(1024)):
        with pytest.raises(h11.LocalProtocolError):
            syntax.send_head(200, [(b"x-request-id", value)])
        assert not syntax.begun
        assert syntax.send_head(500, [(b"content-length", b"0")]).startswith(b"HTTP/1.1 500 ")
