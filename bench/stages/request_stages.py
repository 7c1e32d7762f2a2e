"""The stages of a request's way: reading it, its prompt, its call over a link, and its first and last events."""

from __future__ import annotations

import logging
from itertools import count

import trio

from actors.kit.calls import Address, BugCounter, Call, mailbox
from bench.stages.choice_stages import choice_stages
from bench.stages.measure import Once, Stage
from bench.stages.model import CHAT_BODY, CREATE_EVENT, REQUEST_HEAD, REQUEST_ID, TURNS, Subject, generate
from bench.stages.token_stages import pass_on
from protocol.dialects import chat
from protocol.dialects.request_body import decode
from protocol.dialects.responses import requests
from protocol.dialects.responses.events import Events
from protocol.link import codec
from protocol.link.frames import End, Open
from protocol.link.peer import Peer
from protocol.messages.engine import Done
from protocol.messages.generation import Finished, FinishReason, Usage
from protocol.messages.operations import FlushCache
from protocol.messages.text import ChoiceEnded
from supervisor.gateway.admission import AdmissionGate
from supervisor.gateway.http.syntax import HttpSyntax
from supervisor.telemetry.logs import JsonFormatter

HEAD_BYTES_MAX = 64 * 1024
INBOX = 16
ENDED, USAGE = ChoiceEnded(FinishReason.LENGTH), Usage(30, 128, 16)
RESULT = codec.encode(Finished(FinishReason.LENGTH, USAGE))
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
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


def _exchange() -> bytes:
    """Read a request, and write the head and the end of its answer."""
    syntax = HttpSyntax(HEAD_BYTES_MAX)
    syntax.receive_data(REQUEST_HEAD + CHAT_BODY)
    syntax.next_event()
    assert syntax.take_body() == CHAT_BODY
    return syntax.send_head(200, STREAM_HEADERS) + syntax.send_end()


def _create() -> requests.Create:
    create = requests.read_event(decode(CREATE_EVENT))
    assert isinstance(create, requests.Create)
    return create


def _tokenise(subject: Subject) -> Once:
    text = subject.model.prompt(TURNS)
    return lambda: subject.model.encode_text(text, special=False)


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


def _admission() -> Once:
    gate = AdmissionGate(requests_max=64, admit_s=10.0, waiting_max=64, unready=lambda: None)

    async def once() -> int:
        async with gate.admitted(owner="alice"):
            return gate.inside

    return once


def _call(nursery: trio.Nursery) -> Once:
    """Call an actor that answers each call in a task of its own."""
    address: Address[FlushCache, Done, Done]
    address, inbox = mailbox(INBOX)
    bugs, request = BugCounter(), FlushCache()

    async def actor() -> None:
        async with trio.open_nursery() as requests:
            while True:
                requests.start_soon(serve, await inbox.receive())

    async def serve(call: Call[FlushCache, Done, Done]) -> None:
        with call.answering(bugs) as answer:
            answer.end(Done())

    nursery.start_soon(actor)

    async def once() -> Done | None:
        async with address.ask(request, 0) as answer:
            return await answer.result()

    return once


def request_stages(subject: Subject) -> tuple[Stage, ...]:
    """Return the stages in the order in which a request passes them."""
    return (
        Stage("read a plain request, and write the head and the end of a stream", lambda _: _exchange),
        Stage("admission without a wait", lambda _: _admission()),
        Stage("parse the body of a chat completion", lambda _: lambda: chat.parse(CHAT_BODY)),
        Stage("parse the event of a response", lambda _: _create),
        Stage("render the chat template", lambda _: lambda: subject.model.prompt(TURNS)),
        Stage(f"tokenise {len(subject.prompt_ids)} tokens", lambda _: _tokenise(subject)),
        *choice_stages(),
        Stage("a call of an actor that answers at once", _call),
        Stage("open and end a stream of a link, at both ends", lambda _: _stream(subject)),
        Stage("the first and last events of a response", lambda _: _response_events()),
        Stage("a line of the access log", lambda _: _log_line()),
    )
