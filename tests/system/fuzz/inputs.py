"""One input: what it is, made from its number alone."""

from __future__ import annotations

from enum import Enum
from random import Random

from attrs import frozen

from tests.system.fuzz import bodies, http, valid_requests, websocket
from tests.system.fuzz.bodies import mutated

EXACT_EVERY = 50
NO_TEXT = 1007
POSTS = [operation for operation in http.OPERATIONS if operation.request is not None]


class Leave(Enum):
    """How a client disconnects."""

    QUIET = "closes when nothing more comes"
    HALF = "shuts its sending side at once, and reads on"
    LATE_HALF = "shuts its sending side when nothing more comes, and reads on"
    CLOSE = "closes at once"
    RESET = "resets at once"
    STALL = "does nothing until the server has had enough"


LEAVES = (
    *[Leave.QUIET] * 9,
    *[Leave.HALF] * 4,
    *[Leave.LATE_HALF] * 2,
    *[Leave.CLOSE] * 2,
    *[Leave.RESET] * 2,
    Leave.STALL,
)


@frozen
class Input:
    """The input of one client."""

    number: int
    kind: str  # "exchange" and "event" go over connections that are kept
    pieces: list[bytes]
    leave: Leave = Leave.QUIET
    exact: valid_requests.Exact | None = None
    closes: int | None = None  # the code by which a WebSocket must close because of it


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def make(number: int, seed: int = 0) -> Input:
    """Return the input of this number."""
    rng = Random(f"{seed}/{number}")
    if number % EXACT_EVERY == 0:
        wanted = valid_requests.make(rng)
        return Input(number, wanted.kind, [wanted.data], exact=wanted)
    kind = rng.random()
    if kind < 0.54:
        operation = rng.choice(POSTS)
        body = mutated(rng, bodies.body(rng, operation))
        return Input(number, "exchange", [http.posted(operation.path, body)])
    if kind < 0.78:
        text = websocket.event_text(rng)
        return Input(number, "event", [websocket.frame(text)], closes=None if _is_text(text) else NO_TEXT)
    if kind < 0.91:
        return Input(number, "http", http.raw(rng), rng.choice(LEAVES))
    return Input(number, "websocket", websocket.raw(rng), rng.choice(LEAVES))
