"""Clients that leave at a stage of their request: a scene begins requests, leaves one, and returns since when."""

from __future__ import annotations

import re
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from attrs import define, field, frozen

from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.prompts import uncached_prompt

TOKENS = 3000  # of an answer that is left: it would take longer than any time that is measured
SHORT, LONG = 8, 3000  # tokens of a prompt; together with the answer the tiny model takes 4,096
LONG_ANSWER = 900
PIECES = 20  # of an answer in mid stream
SLOTS = 4
BLOCKING_TOKENS = 250
QUEUED_S = 0.3
IN_PREFILL = 0.4  # of the time to the first token
PEEK_BYTES = 65536
CONTENT = re.compile(rb'"content": ?"[^"]')
SCHEMA = {"type": "array", "items": {"type": "integer"}}
GRAMMAR: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}
}
PARAMETERS = {"type": "object", "properties": {"numbers": SCHEMA}, "required": ["numbers"]}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}


class Refused(Exception):
    """The server does not take such a request."""


@frozen
class Left:
    """A client that has left."""

    since: float  # when its request should have been over
    reached: bool  # it was in the stage that the scene is about


@define
class Stage:
    """One server, and what the scenes need to know of it."""

    port: int
    first_token_s: float = 0.0  # of a short prompt
    long_first_token_s: float = 0.0
    _numbers: Iterator[int] = field(factory=partial(count, 1))
    _open: list[Chat] = field(factory=list)

    def body(self, tokens: int = SHORT, answer: int = TOKENS, **options: Any) -> dict[str, Any]:
        """Return a request whose prompt no cache has."""
        return chat_body(uncached_prompt(tokens, next(self._numbers)), answer, **options)

    def ask(self, body: dict[str, Any]) -> Chat:
        """Send a request, whose connection stays open until `close`."""
        chat = Chat(self.port, body)
        self._open.append(chat)
        return chat

    def measure(self) -> None:
        """Measure the times to the first token."""
        self.first_token_s = self._first_token_s(SHORT)
        self.long_first_token_s = self._first_token_s(LONG)

    def _first_token_s(self, tokens: int) -> float:
        times_s = []
        for _ in range(3):
            begin = time.perf_counter()
            outcome = Chat(self.port, self.body(tokens, 2)).read()
            if outcome.first_at is None:
                raise Refused(f"a prompt of about {tokens} tokens: {outcome.status} {outcome.error}")
            times_s.append(outcome.first_at - begin)
        return statistics.median(times_s)

    def close(self) -> None:
        """Close every connection that a scene has left open."""
        while self._open:
            self._open.pop().close()


Leave = Callable[[Chat], None]
WAYS: dict[str, Leave] = {"close": Chat.close, "reset": Chat.reset, "half-close": Chat.half_close}


def leave(chat: Chat, way: str) -> float:
    """Leave, and return when."""
    left_at = time.perf_counter()
    WAYS[way](chat)
    return left_at


def has_begun(chat: Chat) -> bool:
    """Whether text of an answer has come that nobody has read."""
    sock: socket.socket = chat.connection.sock
    if not select.select([sock], [], [], 0)[0]:
        return False
    received = sock.recv(PEEK_BYTES, socket.MSG_PEEK)
    return not received or CONTENT.search(received) is not None or b" 200 " not in received[:16]


def read_pieces(chat: Chat, pieces: int) -> bool:
    """Read an answer up to a piece of it; return whether it goes on then; raises `Refused`."""
    for _ in chat.events():
        if chat.outcome.pieces >= pieces:
            return chat.outcome.finish is None
    if chat.outcome.status != 200:
        raise Refused(f"{chat.outcome.status} {_words(chat.outcome.error)}")
    return False


def _words(error: dict[str, Any] | None) -> str:
    return str((error or {}).get("message", error))[:80]


# The scenes -------------------------------------------------------------------------------


@contextmanager
def full(stage: Stage) -> Iterator[list[BackgroundReader]]:
    """Fill every slot with requests whose clients stay; yield their readers."""
    with ExitStack() as stack:
        chats = [Chat(stage.port, stage.body(answer=BLOCKING_TOKENS)) for _ in range(SLOTS)]
        for chat in chats:
            stack.callback(chat.leave)
        readers = [BackgroundReader(chat.read) for chat in chats]
        deadline = time.perf_counter() + 20.0
        while not all(chat.outcome.first_at for chat in chats) and time.perf_counter() < deadline:
            time.sleep(0.005)
        yield readers


def queued(stage: Stage, way: str) -> Left:
    """Leave while other requests hold all slots; the time begins when those have ended."""
    with full(stage) as readers:
        chat = stage.ask(stage.body())
        time.sleep(QUEUED_S)
        reached = not has_begun(chat) and not any(reader.outcome for reader in readers)
        leave(chat, way)
        outcomes = [reader.wait() for reader in readers]
    reached = reached and all(outcome.whole for outcome in outcomes)
    return Left(max(outcome.ended_at for outcome in outcomes), reached)


def in_prefill(stage: Stage, way: str) -> Left:
    """Leave while a long prompt is computed."""
    chat = stage.ask(stage.body(LONG, LONG_ANSWER))
    time.sleep(IN_PREFILL * stage.long_first_token_s)
    reached = not has_begun(chat)
    return Left(leave(chat, way), reached)


def in_stream(stage: Stage, way: str, pieces: int = PIECES, **options: Any) -> Left:
    """Leave after some pieces of the answer."""
    chat = stage.ask(stage.body(**options))
    reached = read_pieces(chat, pieces)
    return Left(leave(chat, way), reached)


def in_calls(stage: Stage, way: str) -> Left:
    """Leave a request for calls of tools; their arguments are no text, so that time has to do."""
    chat = stage.ask(stage.body(**TOOLS))
    events = chat.events()
    if next(events, None) is None:
        raise Refused(f"{chat.outcome.status} {_words(chat.outcome.error)}")
    for _ in range(PIECES):
        next(events, None)
    reached = chat.outcome.ended_at == 0.0 and chat.outcome.finish is None
    return Left(leave(chat, way), reached)


def not_streaming(stage: Stage, way: str) -> Left:
    """Leave while an answer is computed that comes in one piece."""
    chat = stage.ask(stage.body(stream=False))
    time.sleep(2 * stage.first_token_s + QUEUED_S)
    reached = not has_begun(chat)
    return Left(leave(chat, way), reached)


Scene = Callable[[Stage], Left]
SCENES: dict[str, Scene] = {
    "queued behind others, close": partial(queued, way="close"),
    "in the prefill of a long prompt, close": partial(in_prefill, way="close"),
    "in the prefill of a long prompt, reset": partial(in_prefill, way="reset"),
    "at the first token, close": partial(in_stream, way="close", pieces=1),
    "in mid stream, close": partial(in_stream, way="close"),
    "in mid stream, reset": partial(in_stream, way="reset"),
    "in mid stream, half-close": partial(in_stream, way="half-close"),
    "non-streaming, close": partial(not_streaming, way="close"),
    "non-streaming, reset": partial(not_streaming, way="reset"),
    "three choices (n = 3), close": partial(in_stream, way="close", n=3, temperature=1),  # Dynamo takes no 0 then
    "answer kept to a JSON schema, close": partial(in_stream, way="close", **GRAMMAR),
    "calls of tools required, close": partial(in_calls, way="close"),
}
