"""The stages of a token's way, from an engine's step to the client's socket."""

from __future__ import annotations

import socket
from collections import deque
from itertools import cycle

import trio

from actors.kit.calls import Answer
from actors.text.detokenizer import IncrementalDetokenizer
from bench.stages.measure import Once, Stage
from bench.stages.model import CHAT_BODY, CREATE_EVENT, REQUEST_ID, Subject
from protocol.dialects import chat
from protocol.dialects.request_body import decode
from protocol.dialects.responses.events import Events
from protocol.dialects.responses.requests import Create, read_event
from protocol.link.frames import Open, Step, encode
from protocol.link.peer import Peer
from protocol.link.streams import CREDIT_MAX
from protocol.messages.generation import Finished, Tokens
from protocol.messages.text import Text
from supervisor.gateway.outbox import Outbox
from supervisor.gateway.websocket.frames import text_frame
from supervisor.telemetry.metrics import Metrics

STREAMS = 64
BACKLOG_BYTES_MAX = 1 << 20
READ_BYTES = 4096
TEXT = Text(" river", 1)
PAYLOAD = b"x" * 220  # of a chat completion's chunk, about


def linked() -> tuple[Peer, Peer]:
    """Return both ends of a link: the asker, and the end that serves it; `STREAMS` streams are open."""
    asker, server = Peer("front", serves_max=STREAMS), Peer("worker", serves_max=STREAMS)
    for stream in range(1, STREAMS + 1):
        pass_on(server, asker)
        asker.send(Open(stream, b"", CREDIT_MAX))
        pass_on(asker, server)
    return asker, server


def pass_on(sender: Peer, receiver: Peer) -> None:
    """Move what one end has queued to the other."""
    for _ in receiver.receive_data(sender.data_to_send()):
        pass


def _step(subject: Subject) -> Step:
    streams = list(range(1, STREAMS + 1))
    ids = [token for _, token in zip(streams, cycle(subject.ids), strict=False)]
    return Step(streams, [1] * STREAMS, ids, [], [])


def _queue_step(subject: Subject) -> Once:
    (_, server), step = linked(), _step(subject)

    def once() -> bytes:
        server.send(step)
        return server.data_to_send()

    return once


def _read_step(subject: Subject) -> Once:
    (asker, _), data = linked(), encode(_step(subject))
    return lambda: [list(frame.pieces()) for frame in asker.receive_data(data) if isinstance(frame, Step)]


def _relay(subject: Subject, nursery: trio.Nursery) -> Once:
    """Put a step's tokens of one stream into an answer that another is relayed to, as two actors in a row do."""
    first: Answer[Tokens, Finished] = Answer(CREDIT_MAX)
    second: Answer[Tokens, Finished] = Answer(CREDIT_MAX)
    replies = [Tokens((token,)) for token in subject.ids[:STREAMS]]
    nursery.start_soon(first.relay, second.put)
    received: deque[Tokens] = deque(maxlen=1)
    nursery.start_soon(second.relay, received.append)

    def once() -> Tokens:
        for reply in replies:
            first.put(reply)
        return received[-1]

    return once


def _detokenise(subject: Subject) -> Once:
    reading = IncrementalDetokenizer(subject.model.tokenizer, eos_ids=subject.model.eos_token_ids)
    pieces = cycle([[token] for token in subject.ids])
    return lambda: reading.feed(next(pieces))


def _look_up(subject: Subject) -> Once:
    reading = IncrementalDetokenizer(
        subject.model.tokenizer, eos_ids=subject.model.eos_token_ids, whole_tokens=subject.model.whole_tokens
    )
    ids = cycle(subject.ids)

    def once() -> Text | None:
        token = next(ids)
        return reading.feed_whole(token) or reading.feed([token])

    return once


def _metrics() -> Once:
    gaps = Metrics().token_gaps("tiny")
    return lambda: gaps.observe(0.01)


def _chat_chunk() -> Once:
    chunks = chat.Chunks(chat.parse(CHAT_BODY), request_id=REQUEST_ID, created=0)
    chunks.text(TEXT)
    return lambda: chunks.text(TEXT)


def _delta() -> Once:
    create = read_event(decode(CREATE_EVENT))
    assert isinstance(create, Create)
    events = Events(create, request_id=REQUEST_ID, created_at=0)
    events.begin()
    events.open()
    return lambda: events.delta(TEXT)


def _write(nursery: trio.Nursery) -> Once:
    ours, client = socket.socketpair()
    for end in (ours, client):
        end.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    outbox = Outbox(stream, BACKLOG_BYTES_MAX, 60.0)

    async def keep() -> None:
        """Keep both ends open until the stage is over."""
        with client:
            async with stream:
                await trio.sleep_forever()

    nursery.start_soon(keep)

    def once() -> bytes:
        outbox.put(PAYLOAD)
        return client.recv(READ_BYTES)

    return once


def token_stages(subject: Subject) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them."""
    return (
        Stage("its part of queueing and sending a Step of 64", lambda _: _queue_step(subject), STREAMS),
        Stage("its part of reading and checking a Step of 64", lambda _: _read_step(subject), STREAMS),
        Stage("relay through two answers", lambda nursery: _relay(subject, nursery), STREAMS),
        Stage("detokenise", lambda _: _detokenise(subject)),
        Stage("look up a token that is whole", lambda _: _look_up(subject)),
        Stage("the metrics of a token", lambda _: _metrics()),
        Stage("a chunk of a chat completion", lambda _: _chat_chunk()),
        Stage("a delta event of a response", lambda _: _delta()),
        Stage("a WebSocket frame", lambda _: lambda: text_frame(PAYLOAD)),
        Stage("write to a socket pair, and read there", _write),
    )
