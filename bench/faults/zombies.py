"""The time of an engine's useless work after clients have left, at every stage of a request and in several ways.

Measured from outside, by the CPU time of the engine's processes (`activity`), in steps of 0.1 s: the same for every
server. A scene begins requests, leaves one, and returns the time at which its request should have been over.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

from attrs import define, field

from bench.faults.aborts import first_token
from bench.faults.activity import Activity, Afterwards, EngineEnded, Unobservable, calibrate
from bench.faults.scenario import Run
from bench.faults.servers import each_server, fresh
from bench.peers.peer import Peer
from bench.peers.running import NotReady, Running
from bench.rig.clients import BackgroundReader, Chat, chat_body
from bench.rig.node import wait_until
from bench.rig.prompts import uncached_prompt

TOKENS = 3000  # of an answer that is left: it would take longer than any time that is measured
SHORT, LONG = 8, 3000  # tokens of a prompt; together with the answer the tiny model takes 4,096
LONG_ANSWER = 900
PIECES = 20  # of an answer in mid stream
SLOTS = 4
LIMIT_S = 30.0  # of one try
STARTS_MAX = 4  # of one server, which is started again when it did not become idle or died
COLUMNS = ("server", "a client leaves", "computed s", "CPU s", "left in the stage", "still counted")
NOTE = (
    "Seconds from the client's leaving (queued: from the end of the requests before it) to the last 0.1 s in which the "
    "engine's processes used more CPU time than the threshold between idle and busy. 0: it was idle at once. A try "
    "whose client left in another stage, for instance when its answer had ended, has no time."
)
BLOCKING_TOKENS = 250
QUEUED_S = 0.3
IN_PREFILL = 0.4  # of the time to the first token
PEEK_BYTES = 65536
CONTENT = re.compile(rb'"content": ?"[^"]')
SCHEMA = {"type": "array", "items": {"type": "integer"}}
GRAMMAR: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}
}


class Refused(Exception):
    """The server does not take such a request."""


Left = tuple[float, bool]
"""When the request of a client that left should have been over; whether the client was in the stage of the scene."""


@define
class Stage:
    """One server, and what the scenes need to know of it."""

    port: int
    first_token_s: float  # of a short prompt
    long_first_token_s: float  # of the prompt in whose prefill clients leave
    _numbers: Iterator[int] = field(factory=partial(count, 1))
    _open: ExitStack = field(factory=ExitStack)

    def body(self, tokens: int = SHORT, answer: int = TOKENS, **options: Any) -> dict[str, Any]:
        """Return a request whose prompt no cache has."""
        return chat_body(uncached_prompt(tokens, next(self._numbers)), answer, **options)

    def ask(self, body: dict[str, Any]) -> Chat:
        """Send a request, whose connection stays open until `close`."""
        chat = Chat(self.port, body)
        self._open.callback(chat.close)
        return chat

    def close(self) -> None:
        """Close every connection that a scene has left open."""
        self._open.close()


Way = Callable[[Chat], None]


def leave(chat: Chat, way: Way, *, reached: bool) -> Left:
    """Leave, and return when."""
    left_at = time.perf_counter()
    way(chat)
    return left_at, reached


def has_begun(chat: Chat) -> bool:
    """Whether unread text of an answer has come."""
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
        wait_until(lambda: all(chat.outcome.first_at for chat in chats), 20.0)
        yield readers


def queued(stage: Stage, way: Way) -> Left:
    """Leave while other requests hold all slots; the time begins when those have ended."""
    with full(stage) as readers:
        chat = stage.ask(stage.body())
        time.sleep(QUEUED_S)
        reached = not has_begun(chat) and not any(reader.outcome for reader in readers)
        way(chat)
        outcomes = [reader.wait() for reader in readers]
    reached = reached and all(outcome.whole for outcome in outcomes)
    return max(outcome.ended_at for outcome in outcomes), reached


def in_prefill(stage: Stage, way: Way) -> Left:
    """Leave while a long prompt is computed."""
    chat = stage.ask(stage.body(LONG, LONG_ANSWER))
    time.sleep(IN_PREFILL * stage.long_first_token_s)
    return leave(chat, way, reached=not has_begun(chat))


def in_stream(stage: Stage, way: Way, pieces: int = PIECES, **options: Any) -> Left:
    """Leave after some pieces of the answer."""
    chat = stage.ask(stage.body(**options))
    return leave(chat, way, reached=read_pieces(chat, pieces))


def not_streaming(stage: Stage, way: Way) -> Left:
    """Leave while an answer is computed that comes in one piece."""
    chat = stage.ask(stage.body(stream=False))
    time.sleep(2 * stage.first_token_s + QUEUED_S)
    return leave(chat, way, reached=not has_begun(chat))


SCENES: dict[str, Callable[[Stage], Left]] = {
    "queued behind others, close": partial(queued, way=Chat.close),
    "in the prefill of a long prompt, close": partial(in_prefill, way=Chat.close),
    "in the prefill of a long prompt, reset": partial(in_prefill, way=Chat.reset),
    "at the first token, close": partial(in_stream, way=Chat.close, pieces=1),
    "in mid stream, close": partial(in_stream, way=Chat.close),
    "in mid stream, reset": partial(in_stream, way=Chat.reset),
    "in mid stream, half-close": partial(in_stream, way=Chat.half_close),
    "non-streaming, close": partial(not_streaming, way=Chat.close),
    "non-streaming, reset": partial(not_streaming, way=Chat.reset),
    "three choices (n = 3), close": partial(in_stream, way=Chat.close, n=3, temperature=1),  # Dynamo takes no 0 then
    "answer kept to a JSON schema, close": partial(in_stream, way=Chat.close, **GRAMMAR),
}


# The run ---------------------------------------------------------------------------------


Try = tuple[bool, Afterwards, bool]
"""Whether the client left in that stage; the engine afterwards; whether the server still counted requests then."""


def zombies(run: Run) -> None:
    """Measure each server, and add a row for each scene."""
    each_server(run, measured)


def measured(run: Run, peer: Peer) -> None:
    """Try each scene so often, on a new server where the last did not become idle."""
    left, starts, rows = run.chosen(SCENES), 0, len(run.rows)
    while left and starts < STARTS_MAX:
        starts += 1
        with fresh(peer, slots=SLOTS) as running:
            try:
                _try_on(run, running, left)
            except (Refused, Unobservable) as error:
                run.notes.append(f"{peer.title}: {error}")
                break
            except (OSError, AssertionError, EngineEnded) as error:
                run.notes.append(f"{peer.title}: it could not be asked any more ({error}); {running.ended()} had ended")
    if left:
        run.notes.append(f"{peer.title}: not tried after {starts} starts: {'; '.join(left)}")
    if len(run.rows) == rows:
        raise NotReady("no client could leave it")


def _try_on(run: Run, running: Running, left: list[str]) -> None:
    """Try scenes on one server until it does not become idle; `left` loses each that has been tried."""
    title, activity = running.peer.title, calibrate(running)
    activity.computing(LIMIT_S)
    port = running.setup.port
    stage = Stage(port, first_token(port, SHORT)[0], first_token(port, LONG)[0])
    first = f"a long prompt's first token {stage.long_first_token_s:.2f} s"
    run.notes.append(f"{title}: idle {activity.idle:.4f}, busy {activity.busy:.2f} of a core, {first}")
    computes = False
    while left and not computes:
        name, tries = left.pop(0), list[Try]()
        try:
            while len(tries) < run.options.tries and not computes:
                tries.append(tried(name, stage, activity))
                computes = tries[-1][1].limited and activity.computing(LIMIT_S).limited
        except Refused as error:
            run.row(title, name, f"refused: {error}", None, None, None)
            continue
        add(run, title, name, tries)


def add(run: Run, title: str, name: str, tries: list[Try]) -> None:
    """Add the row of one scene on one server."""
    times, made = [after for reached, after, _ in tries if reached], len(tries)
    cell: str | list[float] = [after.computed_s for after in times]
    if limited := sum(after.limited for after in times):
        cell = f">= {LIMIT_S:g} in {limited} of {len(times)}"
    counted, cpu_s = sum(counts for *_, counts in tries), [after.cpu_s for _, after, _ in tries]
    run.row(title, name, cell, cpu_s, f"{len(times)} of {made}", f"{counted} of {made}")


def tried(name: str, stage: Stage, activity: Activity) -> Try:
    """Try one scene, and observe the engine from the moment that the request should have been over.

    Raises `EngineEnded`, with the scene in which it did.
    """
    try:
        since, reached = SCENES[name](stage)
    finally:
        if "half" not in name:
            stage.close()
    late_s = time.perf_counter() - since
    try:
        after = activity.computing(LIMIT_S)
    except EngineEnded as ended:
        raise EngineEnded(f"{name}: {ended}") from ended
    counted = bool(activity.counts())
    stage.close()
    if after.computed_s:
        after = Afterwards(after.computed_s + late_s, after.cpu_s, limited=after.limited)
    return reached, after, counted
