"""Clients that compare each answer with an undisturbed cluster's.

At temperature 0 an answer depends on its prompt alone, whichever workers computed it and however often it was resumed.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import product, zip_longest
from random import Random
from threading import Event, Lock, Thread
from typing import Any, TypeAlias

from websockets.exceptions import InvalidStatus, WebSocketException

from bench.rig.clients import Chat, Outcome, ResponsesSocket, chat_body, read_or_disconnect, response_body
from bench.rig.prompts import PROMPTS

CHECKED_PROMPTS = (
    *PROMPTS,
    "Who planted the walnut tree?",
    "How deep is the lake? " + "The river runs by the old mill and the oak. " * 20,
)
TOKENS_MAX = (None, 24)
KINDS = ("stream", "whole", "two", "response")
LEAVE_SHARE = 0.12  # of the requests, those whose client disconnects early
LEAVES_WITHIN_S = 3.0
RETRY_AFTER_S = 0.4  # before a client that was refused sends its next request
LOGPROB_DIFFERENCE_MAX = 0.05  # a real engine rounds by its batch, and the beginning of a resumed answer is a prompt
RESTARTING = 1012  # the close code of a server that drains; requests that were on their way have not been read
NEVER_S = 55.0  # an answer that takes longer has no end
REFUSALS = {"overloaded", "not_ready", "draining"}  # of an answer that has not begun


@dataclass(frozen=True)
class CompleteAnswer:
    """A complete answer: its text, finish reason, number of tokens, and the log probability of each."""

    text: str
    finish: str
    tokens: int
    logprobs: tuple[tuple[str, float], ...] | None = None  # None if they were not requested

    def same(self, other: CompleteAnswer) -> bool:
        """Whether both are the same answer, as far as both have log probabilities."""
        equal = (self.text, self.finish, self.tokens) == (other.text, other.finish, other.tokens)
        if not equal or self.logprobs is None or other.logprobs is None:
            return equal
        pairs = zip_longest(self.logprobs, other.logprobs, fillvalue=("", 0.0))
        return all(
            token == other_token and abs(logprob - other_logprob) < LOGPROB_DIFFERENCE_MAX
            for (token, logprob), (other_token, other_logprob) in pairs
        )


References: TypeAlias = dict[tuple[str, int | None], CompleteAnswer]
"""The right answers, by prompt and `tokens_max`."""


@dataclass(frozen=True)
class CheckedRequest:
    """One request: its prompt, its length and the kind of its answer; a `cancel` is a response that is cancelled."""

    kind: str
    prompt: str
    tokens_max: int | None

    @property
    def body(self) -> dict[str, Any]:
        """The request as JSON."""
        limit = {} if self.tokens_max is None else {"max_tokens": self.tokens_max}
        match self.kind:
            case "stream":
                return chat_body(self.prompt, stream_options={"include_usage": True}, **limit)
            case "whole":
                return chat_body(self.prompt, stream=False, logprobs=True, **limit)
            case "two":
                return chat_body(self.prompt, stream=False, n=2, **limit)
        return response_body(self.prompt) | ({"max_output_tokens": self.tokens_max} if limit else {})


@dataclass
class AnswerOutcome:
    """The outcome of one request: complete answers, or the beginning of one and perhaps an error."""

    whole: list[CompleteAnswer] = field(default_factory=list)
    begun: str = ""
    error: str | None = None  # its code
    status: int = 0


def complete_answers(body: dict[str, Any]) -> list[CompleteAnswer]:
    """Return the answers in the body of a response that is no stream."""
    choices = body["choices"]
    tokens = body["usage"]["completion_tokens"] // len(choices)
    answers = []
    for choice in choices:
        content = (choice.get("logprobs") or {}).get("content", ())
        logprobs = tuple((token["token"], token["logprob"]) for token in content) or None
        answers.append(CompleteAnswer(choice["message"]["content"], choice["finish_reason"], tokens, logprobs))
    return answers


def outcome_of_stream(outcome: Outcome) -> AnswerOutcome:
    """Return the outcome of a stream that was read, with its error's code."""
    received = AnswerOutcome(begun=outcome.text, status=outcome.status)
    if outcome.error is not None:
        code = str(outcome.error.get("cause") or outcome.error.get("code"))
        late = "TimeoutError" in str(outcome.error.get("message"))
        received.error = "no end" if late else code
    elif outcome.whole:
        usage = outcome.usage or {}
        tokens = usage.get("completion_tokens", usage.get("output_tokens", -1))
        received.whole = [CompleteAnswer(outcome.text, str(outcome.finish), tokens)]
    elif outcome.finish is not None:
        received.error = outcome.finish
    return received


def send(port: int, request: CheckedRequest, leave_after_s: float | None = None) -> AnswerOutcome:
    """Send a request and read its answer, or disconnect early; every error becomes part of the outcome."""
    try:
        if request.kind in {"response", "cancel"}:
            return _response(port, request, leave_after_s)
        chat = Chat(port, request.body)
        if request.kind == "stream":
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


def _response(port: int, request: CheckedRequest, leave_after_s: float | None) -> AnswerOutcome:
    socket, outcome, events = ResponsesSocket(port), Outcome(), list[str]()
    socket.send(request.body)
    outcome.status = 101

    def read() -> None:
        events.extend(event["type"] for event in socket.events(outcome))

    def cancel() -> None:
        socket.send({"type": "response.cancel"})

    leave = cancel if request.kind == "cancel" else socket.leave
    try:
        received = outcome_of_stream(read_or_disconnect(read, outcome, leave, leave_after_s, NEVER_S + 20.0))
        return replace(received, error="draining") if outcome.close_code == RESTARTING and not events else received
    finally:
        socket.leave()
        socket.close()


def _body(chat: Chat, leave_after_s: float | None) -> AnswerOutcome:
    body: dict[str, Any] = {}
    outcome = read_or_disconnect(
        lambda: body.update(chat.read_body()), chat.outcome, chat.leave, leave_after_s, NEVER_S + 20.0
    )
    return replace(outcome_of_stream(outcome), whole=complete_answers(body) if body else [])


def references(port: int) -> References:
    """Return the answers of an undisturbed cluster to every request, by prompt and `tokens_max`."""

    def reference(key: tuple[str, int | None]) -> CompleteAnswer:
        received = send(port, CheckedRequest("whole", *key))
        if not received.whole:
            raise RuntimeError(f"an undisturbed cluster does not answer: {received}")
        return received.whole[0]

    keys = list(product(CHECKED_PROMPTS, TOKENS_MAX))
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(keys, pool.map(reference, keys), strict=True))


@dataclass(frozen=True)
class GatewayInterruptions:
    """Interruptions of the gateway's node: only while it is killed may a connection end without an error.

    After a SIGTERM it may stop listening, but every request that it has admitted gets an end.
    """

    kills: int = 0  # how often it was killed or came back: odd while it is down
    terminations: int = 0  # how often it got SIGTERM or came back: odd while it drains or is down

    def since(self, before: GatewayInterruptions) -> GatewayInterruptions:
        """Return 1 for each kind with a change since then, or in progress at that time, and else 0."""
        return GatewayInterruptions(
            int(self.kills != before.kills or before.kills % 2),
            int(self.terminations != before.terminations or before.terminations % 2),
        )


def verdict(
    request: CheckedRequest,
    received: AnswerOutcome,
    right: CompleteAnswer,
    *,
    left: bool,
    gateway: GatewayInterruptions,
) -> tuple[str, str | None]:
    """Return the category of an answer, and what is wrong with it, None if nothing is."""
    if (wrong := _wrong(request, received, right)) is not None:
        return "WRONG", wrong
    if received.whole:
        return "whole", None
    if left:
        return "left", None
    if received.error == "no end":
        return "NO END", f"nothing for {NEVER_S:g} s after {received.begun!r}"
    if received.error in {None, "connection"}:
        return _verdict_on_cut(received, gateway)
    return f"{'refused' if received.error in REFUSALS and not received.begun else 'error'} {received.error}", None


def _verdict_on_cut(received: AnswerOutcome, gateway: GatewayInterruptions) -> tuple[str, str | None]:
    if gateway.kills:
        return "connection lost with the front", None
    if gateway.terminations and not received.status:
        return "refused nobody is there", None
    return "CUT", f"the connection ended without an error after {received.begun!r} (status {received.status})"


def _wrong(request: CheckedRequest, received: AnswerOutcome, right: CompleteAnswer) -> str | None:
    """Return what is wrong with an answer or its beginning, None if nothing is."""
    if received.whole and len(received.whole) != (2 if request.kind == "two" else 1):
        return f"{len(received.whole)} answers"
    for answer in received.whole:
        if not answer.same(right):
            return f"{answer} instead of {right}"
    if not received.whole and not right.text.startswith(received.begun.removesuffix("\ufffd")):
        return f"began {received.begun!r} and ended in {received.error}, instead of {right.text!r}"
    return None


@dataclass
class Tally:
    """The outcomes of all requests, counted by category."""

    counts: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def note(self, request: CheckedRequest, category: str, why: str | None, took_s: float) -> None:
        """Count one answer."""
        with self.lock:
            self.counts[category] += 1
            self.slowest_s = max(self.slowest_s, took_s)
            if why is not None:
                self.bad.append(f"{category}: {json.dumps(request.body)[:200]}: {why} (after {took_s:.1f} s)")

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(self.counts.values())

    def lines(self) -> Iterable[str]:
        """Yield the counts, the most frequent first."""
        for category, count in self.counts.most_common():
            yield f"{count:>7}  {category}"


@contextmanager
def running(
    tally: Tally,
    port: int,
    right: References,
    count: int,
    seed: int,
    gateway: Callable[[], GatewayInterruptions],
    leave_share: float = LEAVE_SHARE,
) -> Iterator[None]:
    """Run so many clients while the body runs; `gateway` returns the interruptions of its node so far.

    A failed or endless client counts as bad.
    """
    over = Event()

    def run(chance: Random) -> None:
        try:
            _send_requests(tally, port, chance, right, over, gateway, leave_share)
        except Exception as error:  # noqa: BLE001  # any of them fails the run
            tally.bad.append(f"a client of the bench failed: {error!r}")

    threads = [Thread(target=run, args=(Random(seed * 1000 + number),), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(NEVER_S + 30.0)
        if never := sum(thread.is_alive() for thread in threads):
            tally.bad.append(f"{never} clients never ended")


def _send_requests(
    tally: Tally,
    port: int,
    chance: Random,
    right: References,
    over: Event,
    gateway: Callable[[], GatewayInterruptions],
    leave_share: float,
) -> None:
    """Send one request after the other until `over` is set."""
    while not over.is_set():
        if gateway().kills % 2:
            over.wait(RETRY_AFTER_S)  # nothing listens
            continue
        request = CheckedRequest(chance.choice(KINDS), chance.choice(CHECKED_PROMPTS), chance.choice(TOKENS_MAX))
        leave_after_s = chance.uniform(0, LEAVES_WITHIN_S) if chance.random() < leave_share else None
        before, start = gateway(), time.perf_counter()
        received = send(port, request, leave_after_s)
        took_s = time.perf_counter() - start
        interruptions, left = gateway().since(before), leave_after_s is not None
        reference = right[request.prompt, request.tokens_max]
        category, why = verdict(request, received, reference, left=left, gateway=interruptions)
        tally.note(request, category, why, took_s)
        if category not in {"whole", "left"}:
            over.wait(RETRY_AFTER_S * chance.uniform(0.5, 1.5))
