"""Clients that check their answers: each is compared with the one that an undisturbed cluster gave.

At temperature 0 an answer depends on its prompt alone, whoever computes it and however often it was moved.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import product, zip_longest
from random import Random
from threading import Event, Lock
from typing import Any

from websockets.exceptions import InvalidStatus, WebSocketException

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, read_or_disconnect, response_body
from bench.rig.prompts import PROMPTS

ASKED_PROMPTS = (
    *PROMPTS,
    "Who planted the walnut tree?",
    "How deep is the lake? " + "The river runs by the old mill and the oak. " * 20,
)
TOKENS_MAX = (None, 24)
KINDS = ("stream", "whole", "two", "response")
LEFT = 0.12
LEAVES_WITHIN_S = 3.0
REFUSED_S = 0.4  # before a client that was refused comes back
LOGPROB_APART = 0.05  # a real engine rounds by what it computes together, and a resumed answer's beginning is a prompt
RESTARTING = 1012  # how a WebSocket closes whose server drains; what crosses it has not been read
NEVER_S = 55.0  # whatever takes longer had no end
REFUSALS = {"overloaded", "not_ready", "draining"}  # when nothing has been said yet


@dataclass(frozen=True)
class CompleteAnswer:
    """A complete answer: its text, finish reason, number of tokens, and the log probability of each."""

    text: str
    finish: str
    tokens: int
    logprobs: tuple[tuple[str, float], ...] | None = None  # where they were asked for

    def same(self, other: CompleteAnswer) -> bool:
        """Whether both are the same answer, as far as both have log probabilities."""
        alike = (self.text, self.finish, self.tokens) == (other.text, other.finish, other.tokens)
        if not alike or self.logprobs is None or other.logprobs is None:
            return alike
        pairs = list(zip_longest(self.logprobs, other.logprobs, fillvalue=("", 0.0)))
        return all(one[0] == two[0] and abs(one[1] - two[1]) < LOGPROB_APART for one, two in pairs)


@dataclass(frozen=True)
class CheckedRequest:
    """One request: its prompt, its length and the kind of its answer."""

    kind: str
    prompt: str
    tokens_max: int | None

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        most = {} if self.tokens_max is None else {"max_tokens": self.tokens_max}
        match self.kind:
            case "stream":
                return chat_body(self.prompt, stream_options={"include_usage": True}, **most)
            case "whole":
                return chat_body(self.prompt, stream=False, logprobs=True, **most)
            case "two":
                return chat_body(self.prompt, stream=False, n=2, **most)
        return response_body(self.prompt) | ({"max_output_tokens": self.tokens_max} if most else {})


@dataclass
class AnswerOutcome:
    """The outcome of one request: complete answers, or the beginning of one and perhaps an error."""

    whole: list[CompleteAnswer] = field(default_factory=list)
    begun: str = ""
    error: str | None = None  # its code
    status: int = 0


def complete_answers(body: dict[str, Any]) -> list[CompleteAnswer]:
    """Return the answers in a body that is no stream."""
    choices, tokens = body["choices"], body["usage"]["completion_tokens"]
    found = []
    for choice in choices:
        scores = choice.get("logprobs")
        logprobs = scores and tuple((each["token"], each["logprob"]) for each in scores["content"])
        found.append(
            CompleteAnswer(
                choice["message"]["content"], choice["finish_reason"], tokens // len(choices), logprobs or None
            )
        )
    return found


def outcome_of_stream(outcome: Outcome) -> AnswerOutcome:
    """Return the outcome of a stream."""
    heard = AnswerOutcome(begun=outcome.text, status=outcome.status)
    if outcome.error is not None:
        code = str(outcome.error.get("cause") or outcome.error.get("code"))
        late = "TimeoutError" in str(outcome.error.get("message"))
        heard.error = "no end" if late else code
    elif outcome.whole:
        usage = outcome.usage or {}
        tokens = usage.get("completion_tokens", usage.get("output_tokens", -1))
        heard.whole = [CompleteAnswer(outcome.text, str(outcome.finish), tokens)]
    elif outcome.finish is not None:
        heard.error = outcome.finish
    return heard


def ask(port: int, wanted: CheckedRequest, leave_after_s: float | None = None) -> AnswerOutcome:
    """Send a request and read to the end, or disconnect before; every error becomes part of the outcome."""
    try:
        if wanted.kind == "response":
            return _response(port, wanted, leave_after_s)
        chat = Chat(port, wanted.body)
        if wanted.kind == "stream":
            return outcome_of_stream(
                read_or_disconnect(chat.read, chat.outcome, chat.leave, leave_after_s, NEVER_S + 20.0)
            )
        return _body(chat, leave_after_s)
    except InvalidStatus as refused:  # of a WebSocket
        return AnswerOutcome(
            error=str(json.loads(refused.response.body)["error"]["code"]), status=refused.response.status_code
        )
    except (OSError, HTTPException, WebSocketException, ValueError) as error:
        return AnswerOutcome(error="no end" if isinstance(error, TimeoutError) else "connection")


def _response(port: int, wanted: CheckedRequest, leave_after_s: float | None) -> AnswerOutcome:
    socket, outcome, events = ResponsesSocket(port), Outcome(), list[str]()
    socket.send(wanted.body)
    outcome.status = 101

    def read() -> None:
        events.extend(event["type"] for event in socket.events(outcome))

    try:
        heard = outcome_of_stream(read_or_disconnect(read, outcome, socket.leave, leave_after_s, NEVER_S + 20.0))
        return replace(heard, error="draining") if outcome.close_code == RESTARTING and not events else heard
    finally:
        socket.leave()
        socket.close()


def _body(chat: Chat, leave_after_s: float | None) -> AnswerOutcome:
    body: dict[str, Any] = {}
    outcome = read_or_disconnect(
        lambda: body.update(chat.read_body()), chat.outcome, chat.leave, leave_after_s, NEVER_S + 20.0
    )
    return replace(outcome_of_stream(outcome), whole=complete_answers(body) if body else [])


def references(port: int) -> dict[tuple[str, int | None], CompleteAnswer]:
    """Send every request once to an undisturbed cluster, and return the answers."""

    def one(target: tuple[str, int | None]) -> CompleteAnswer:
        heard = ask(port, CheckedRequest("whole", *target))
        if not heard.whole:
            raise RuntimeError(f"a quiet cluster does not answer: {heard}")
        return heard.whole[0]

    asked = list(product(ASKED_PROMPTS, TOKENS_MAX))
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(asked, pool.map(one, asked), strict=True))


@dataclass(frozen=True)
class GatewayInterruptions:
    """Interruptions of the gateway's node: only while it is killed may a connection end without an error.

    When it was told to end it may come to listen no more; whoever has been let in by then hears how it ends.
    """

    killed: int = 0  # times, and times that it came back: odd while it is down
    told: int = 0

    def since(self, before: GatewayInterruptions) -> GatewayInterruptions:
        """Return what has happened since, or was the case then."""
        return GatewayInterruptions(
            int(self.killed != before.killed or before.killed % 2), int(self.told != before.told or before.told % 2)
        )


def verdict(
    wanted: CheckedRequest, heard: AnswerOutcome, right: CompleteAnswer, *, left: bool, door: GatewayInterruptions
) -> tuple[str, str | None]:
    """Return the category of an answer, and what is wrong with it, if anything."""
    if (wrong := _wrong(wanted, heard, right)) is not None:
        return "WRONG", wrong
    if heard.whole:
        return "whole", None
    if left:
        return "left", None
    if heard.error == "no end":
        return "NO END", f"nothing for {NEVER_S:g} s after {heard.begun!r}"
    if heard.error in {None, "connection"}:
        cut = f"the connection ended without a word after {heard.begun!r} (status {heard.status})"
        fair = door.killed or (door.told and not heard.status)
        lost = "connection lost with the front" if door.killed else "refused nobody is there"
        return (lost, None) if fair else ("CUT", cut)
    return f"{'refused' if heard.error in REFUSALS and not heard.begun else 'error'} {heard.error}", None


def _wrong(wanted: CheckedRequest, heard: AnswerOutcome, right: CompleteAnswer) -> str | None:
    """Return what is wrong with what was heard, whole or not."""
    if heard.whole and len(heard.whole) != (2 if wanted.kind == "two" else 1):
        return f"{len(heard.whole)} answers"
    for each in heard.whole:
        if not each.same(right):
            return f"{each} instead of {right}"
    if not heard.whole and not right.text.startswith(heard.begun.removesuffix("\ufffd")):
        return f"began {heard.begun!r} and ended in {heard.error}, instead of {right.text!r}"
    return None


@dataclass
class Tally:
    """The outcomes of all requests."""

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def note(self, wanted: CheckedRequest, how: str, why: str | None, took_s: float) -> None:
        """Count one answer."""
        with self.lock:
            self.counts[how] += 1
            self.kinds[wanted.kind] += how == "whole"
            self.slowest_s = max(self.slowest_s, took_s)
            if why is not None:
                self.bad.append(f"{how}: {json.dumps(wanted.body)[:200]}: {why} (after {took_s:.1f} s)")

    @property
    def requests(self) -> int:
        """How many requests there were."""
        return sum(self.counts.values())

    def lines(self) -> Iterable[str]:
        """Yield the counts, the most frequent first."""
        for how, count in self.counts.most_common():
            yield f"{count:>7}  {how}"


def client(tally: Tally, *target: Any, **more: Any) -> None:
    """Send requests until `over` is set; an exception of the client itself counts as bad."""
    try:
        _client(tally, *target, **more)
    except Exception as error:  # noqa: BLE001  # whatever it is, somebody must see it
        tally.bad.append(f"a client of the bench failed: {error!r}")


def _client(
    tally: Tally,
    port: int,
    chance: Random,
    right: dict[tuple[str, int | None], CompleteAnswer],
    over: Event,
    door: Callable[[], GatewayInterruptions] = GatewayInterruptions,
    leaves: float = LEFT,
) -> None:
    """Ask one thing after the other until it is over; `door` says what has been done to the door's node."""
    while not over.is_set():
        if door().killed % 2:
            over.wait(REFUSED_S)  # there is nobody to ask
            continue
        wanted = CheckedRequest(chance.choice(KINDS), chance.choice(ASKED_PROMPTS), chance.choice(TOKENS_MAX))
        leave_after_s = chance.uniform(0, LEAVES_WITHIN_S) if chance.random() < leaves else None
        before, start = door(), time.perf_counter()
        heard = ask(port, wanted, leave_after_s)
        took_s = time.perf_counter() - start
        of_door, left = door().since(before), leave_after_s is not None
        how, why = verdict(wanted, heard, right[wanted.prompt, wanted.tokens_max], left=left, door=of_door)
        tally.note(wanted, how, why, took_s)
        if how not in {"whole", "left"}:
            over.wait(REFUSED_S * chance.uniform(0.5, 1.5))
