"""The stages of a request's way: reading it, its prompt, its call over a link, and its first and last events."""

from __future__ import annotations

import logging
from itertools import count

import h11
from wsproto import ConnectionType
from wsproto.connection import Connection

from bench.load.websocket import TEXT, frame
from bench.stages.measure import AnyStage, Once, Stage
from bench.stages.model import CHAT_BODY, CREATE_EVENT, REQUEST_HEAD, REQUEST_ID, TURNS, Subject, generate
from bench.stages.token_stages import pass_on
from protocol import codec
from protocol.dialects import chat
from protocol.dialects.request_body import decode
from protocol.dialects.responses import requests
from protocol.dialects.responses.events import Events
from protocol.frames import End, Open
from protocol.messages import Finished, FinishReason, Usage
from protocol.peer import Peer
from protocol.text_messages import Answered, ChoiceEnded
from supervisor.gateway.http.head_checks import check_head
from supervisor.gateway.http.plain_head import RequestHead
from supervisor.gateway.http.syntax import HttpSyntax
from supervisor.telemetry.logs import JsonFormatter
from supervisor.telemetry.metrics import Metrics

HEAD_BYTES_MAX = 64 * 1024
ENDED, USAGE = ChoiceEnded(FinishReason.LENGTH), Usage(30, 128, 16)
RESULT = codec.encode(Finished(FinishReason.LENGTH, USAGE))
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"transfer-encoding", b"chunked")]
LINE: dict[str, object] = {
    "request_id": REQUEST_ID,
    "trace": REQUEST_ID,
    "span": REQUEST_ID[:16],
    "key": "-",
    "api": "chat",
    "request": "POST /v1/chat/completions",
    "status": 200,
    "model": "tiny",
    "outcome": "length",
    "response_bytes": 9076,
    "duration_s": 1.226,
    "waited_s": 0.0004,
    "first_token_s": 0.0569,
    "prompt_tokens": 73,
    "cached_tokens": 0,
    "completion_tokens": 128,
}


def _read_http() -> tuple[h11.Connection, h11.Request]:
    syntax = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
    syntax.receive_data(REQUEST_HEAD + CHAT_BODY)
    request = syntax.next_event()
    assert isinstance(request, h11.Request)
    while not isinstance(syntax.next_event(), h11.EndOfMessage):
        pass
    return syntax, request


def _check_http() -> Once:
    _, read = _read_http()
    request = RequestHead(read.method, read.target, read.http_version, tuple(read.headers))
    return lambda: check_head(REQUEST_HEAD, request)


def _read_plain() -> HttpSyntax:
    syntax = HttpSyntax(HEAD_BYTES_MAX)
    syntax.receive_data(REQUEST_HEAD + CHAT_BODY)
    syntax.next_event()
    assert syntax.plain
    assert syntax.take_body() == CHAT_BODY
    return syntax


def _plain_both() -> bytes:
    """Read a plain request, and write the head and the end of its answer."""
    syntax = _read_plain()
    return syntax.send_head(200, STREAM_HEADERS[:1]) + syntax.send_end()


def _http_both() -> bytes:
    """Read a request, and write the head and the end of its answer: h11 writes only to a connection that was asked."""
    syntax, _ = _read_http()
    response = h11.Response(status_code=200, headers=STREAM_HEADERS)
    return b"".join(syntax.send(event) or b"" for event in (response, h11.EndOfMessage()))


def _read_websocket() -> Once:
    data = frame(TEXT, CREATE_EVENT.encode(), b"mask")
    connection = Connection(ConnectionType.SERVER)

    def once() -> object:
        connection.receive_data(data)
        return list(connection.events())

    return once


def _create() -> requests.Create:
    create = requests.read_event(decode(CREATE_EVENT))
    assert isinstance(create, requests.Create)
    return create


def _respond() -> Once:
    request = chat.parse(CHAT_BODY)
    return lambda: chat.to_respond(request, request_id=REQUEST_ID)


def _tokenise(subject: Subject) -> Once:
    text = subject.model.prompt(TURNS)
    return lambda: subject.model.encode_text(text, special=False)


def _codec(subject: Subject) -> Once:
    request = generate(subject.prompt_ids)
    return lambda: codec.decode(codec.encode(request))


def _stream(subject: Subject) -> Once:
    """Open a stream and end it, at both ends of a link."""
    asker, server = Peer("front", serves_max=0), Peer("worker", serves_max=1)
    pass_on(server, asker)
    numbers, body = count(1), codec.encode(generate(subject.prompt_ids))

    def once() -> None:
        number = next(numbers)
        asker.send(Open(number, body, 128))
        pass_on(asker, server)
        server.send(End(number, RESULT))
        pass_on(server, asker)

    return once


def _response_events() -> Once:
    create = _create()

    def once() -> object:
        events = Events(create, request_id=REQUEST_ID, created_at=0)
        return events.begin(), events.open(), events.finish(ENDED, USAGE)

    return once


def _chat_chunks() -> Once:
    request = chat.parse(CHAT_BODY)

    def once() -> object:
        chunks = chat.Chunks(request, request_id=REQUEST_ID, created=0)
        return chunks.choice_ended(ENDED), chunks.finish(Answered(USAGE))

    return once


class _Formatting(logging.Handler):
    """A handler that formats lines and writes them nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)


def _log_line() -> Once:
    logger = logging.Logger("bench.stages", logging.INFO)  # noqa: LOG001  # no other logger may get its lines
    handler = _Formatting()
    handler.setFormatter(JsonFormatter("front"))
    logger.addHandler(handler)
    return lambda: logger.info("request ended", extra=LINE)


def _metrics() -> Once:
    metrics = Metrics()

    def once() -> None:
        metrics.first_token("tiny", 0.1)
        metrics.request_ended("tiny", "chat", "length", 1.2, USAGE)

    return once


def request_stages(subject: Subject) -> tuple[AnyStage, ...]:
    """Return the stages in the order in which a request passes them."""
    return (
        Stage("read a plain request with its body", "request", lambda: _read_plain),
        Stage("read a plain request, and write the head and the end of a stream", "request", lambda: _plain_both),
        Stage("h11 reads a request with its body", "request", lambda: _read_http),
        Stage("h11 reads a request, and writes the head and the end of a stream", "request", lambda: _http_both),
        Stage("the strict checks of a head", "request", _check_http),
        Stage("wsproto reads a message", "request", _read_websocket),
        Stage("parse the body of a chat completion", "request", lambda: lambda: chat.parse(CHAT_BODY)),
        Stage("parse the event of a response", "request", lambda: _create),
        Stage("the request for a processor", "request", _respond),
        Stage("render the chat template", "request", lambda: lambda: subject.model.prompt(TURNS)),
        Stage(f"tokenise {len(subject.prompt_ids)} tokens", "request", lambda: _tokenise(subject)),
        Stage("encode and decode a Generate", "request", lambda: _codec(subject)),
        Stage("open and end a stream of a link, at both ends", "request", lambda: _stream(subject)),
        Stage("the first and last events of a response", "request", _response_events),
        Stage("the first and last chunks of a chat completion", "request", _chat_chunks),
        Stage("the metrics of a request", "request", _metrics),
        Stage("a line of the access log", "request", _log_line),
    )
