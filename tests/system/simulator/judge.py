"""The judge of answers: each is complete and right, or a right beginning with the error in which it ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

from attrs import Factory, define, field

from protocol.errors import ERRORS_BY_CODE
from supervisor.gateway.open_streams import COMMENT
from tests.system.simulator.model import BROKEN, Choice, PlannedRequest, whole

May = Callable[[str], bool]
"""Whether a server may report this code, given the faults so far.

`unanswered` stands for a connection that closes before the answer, `cut` for an answer that ends without an error.
"""

PICTURES = "pictures: "
KEEP_ALIVE = COMMENT.decode().rstrip()
"""Before a code: whether a request with pictures may get it, where one without may not."""

OF_LINK = "the asker's time is up"  # the detail of an error whose deadline has crossed a link
NO_TOKEN = "there was no token within"

Json: TypeAlias = dict[str, Any]  # of an answer


@define(eq=False)
class Received:
    """One HTTP answer so far."""

    status: int = 0
    headers: dict[str, str] = Factory(dict)
    body: bytearray = Factory(bytearray)
    whole: bool = False  # it has ended as HTTP requires


def http(request: PlannedRequest, received: Received, may: May, *, stayed: bool) -> str:
    """Judge the answer to a completion, of a chat or of a text; return its outcome."""
    outcome = _http(request, received, may_of(may, request), stayed=stayed)
    assert outcome != "whole" or not request.must_fail, "what must be refused was answered"
    return outcome


def may_of(may: May, request: PlannedRequest) -> May:
    """Return which codes this request may get: also those of its refusal, and of its pictures if it has any."""

    def may_get(code: str) -> bool:
        refused = code in request.errors or (request.refused and code == "engine_refused")
        return refused or may(code) or (bool(request.pictures) and may(PICTURES + code))

    return may_get


def _http(request: PlannedRequest, received: Received, may: May, *, stayed: bool) -> str:
    if received.status == 0:
        return unfinished("unanswered", may, stayed=stayed)
    if received.status != 200:
        if not received.whole:
            return unfinished("cut", may, stayed=stayed)
        return error(json.loads(received.body)["error"], may, received)
    if request.stream:
        assert received.headers["content-type"].startswith("text/event-stream")
        return _Stream(request, may, received).judge(stayed=stayed)
    if not received.whole:
        return unfinished("cut", may, stayed=stayed)
    answer = json.loads(received.body)
    choices = [(_text(choice), choice["finish_reason"]) for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(request.n))
    assert choices == [(choice.text, choice.reason) for choice in whole(request).choices], "a wrong answer"
    for actual, correct in zip(answer["choices"], whole(request).choices, strict=True):
        scores(request, correct, [actual["logprobs"]], ended=True)
    usage(request, answer["usage"])
    return "whole"


def _text(choice: Json) -> str:
    """Return the text of a choice of a chat completion, whole or in pieces, or of a completion."""
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    content: str = message.get("content") or ""
    return content


def unfinished(code: str, may: May, *, stayed: bool) -> str:
    """Judge an answer that stops without an end."""
    assert not stayed or may(code), f"{code} without an error"
    return code if stayed else "left"


def error(answer: Json, may: May, received: Received | None = None) -> str:
    """Judge an error: an allowed code of the table, with its status."""
    code: str = answer["code"]
    assert may(code), f"{code} is not allowed: {answer['message']}"
    assert OF_LINK not in answer["message"], "a generation's deadlines are the gateway's, and cross no link"
    row = ERRORS_BY_CODE[code]
    if received is not None:
        assert received.status == row.http_status
        assert ("retry-after" in received.headers) == (row.retry_after_s is not None)
    return code


def usage(request: PlannedRequest, answer: Json) -> None:
    """Judge the usage of a complete answer."""
    cost = whole(request)
    actual = (answer["prompt_tokens"], answer["completion_tokens"], answer["total_tokens"])
    correct = (cost.prompt_tokens, cost.completion_tokens, cost.prompt_tokens + cost.completion_tokens)
    assert actual == correct, f"usage is {actual}, not {correct}"


def scores(request: PlannedRequest, correct: Choice, answer: list[Json | None], *, ended: bool) -> None:
    """Judge the log probabilities of one choice: each token's own, in order, and none left out."""
    if request.table is not None:
        given = [value for each in answer if each is not None for value in each["token_logprobs"]]
        all_given = ended and correct.reason == "length"
        assert any(given == (table if all_given else table[: len(given)]) for table in correct.tables(request))
        return
    actual = [token for each in answer if each is not None for token in each["content"]]
    if request.logprobs is None:
        assert not actual
        return
    assert [(bytes(token["bytes"]), token["logprob"]) for token in actual] == correct.scores[: len(actual)]
    assert all(len(token["top_logprobs"]) == request.logprobs for token in actual)
    if ended and correct.reason == "length":
        assert len(actual) == len(correct.scores)
    elif ended:
        read = b"".join(bytes(token["bytes"]) for token in actual).decode(errors="replace")
        assert read.startswith(correct.text.rstrip(BROKEN))


@define(eq=False)
class _Stream:
    """The server-sent events of one answer."""

    request: PlannedRequest
    may: May
    received: Received
    texts: defaultdict[int, str] = field(factory=lambda: defaultdict(str))
    reasons: dict[int, str] = Factory(dict)
    logprobs: defaultdict[int, list[Json | None]] = field(factory=lambda: defaultdict(list))
    usages: list[Json] = Factory(list)
    failed: str | None = None

    def judge(self, *, stayed: bool) -> str:
        *events, rest = bytes(self.received.body).decode(errors="ignore").split("\n\n")
        events = [event for event in events if event != KEEP_ALIVE]
        done = bool(events) and events[-1] == "data: [DONE]"
        assert not (stayed and done) or self.received.whole
        for event in events[:-1] if done else events:
            assert self.failed is None, "something follows the error"
            self._event(json.loads(event.removeprefix("data: ")))
        self._texts()
        if done:
            assert len(self.reasons) == self.request.n, "a choice is missing"
            assert len(self.usages) == self.request.usage
            assert self.failed is None
            return "whole"
        assert not self.received.whole, "an answer that was cut looks whole"
        assert not (stayed and rest) or self.may("cut"), "half an event"
        return self.failed or unfinished("cut", self.may, stayed=stayed)

    def _event(self, answer: Json) -> None:
        if "error" in answer:
            self.failed = error(answer["error"], self.may)
            began = any(self.texts.values()) and not self.request.echo  # an echo comes before the first token
            assert not (began and answer["error"]["message"].startswith(NO_TOKEN)), "there was one"
            return
        if answer.get("usage") is not None:
            usage(self.request, answer["usage"])
            self.usages.append(answer["usage"])
        for choice in answer["choices"]:
            number = choice["index"]
            assert number not in self.reasons, "text follows the end of a choice"
            self.texts[number] += _text(choice)
            self.logprobs[number].append(choice["logprobs"])
            if choice["finish_reason"] is not None:
                self.reasons[number] = choice["finish_reason"]

    def _texts(self) -> None:
        choices = whole(self.request).choices
        for number, text in self.texts.items():
            assert choices[number].text.startswith(text), "wrong text"
            scores(self.request, choices[number], self.logprobs[number], ended=number in self.reasons)
        for number, reason in self.reasons.items():
            actual = (self.texts[number], reason)
            assert actual == (choices[number].text, choices[number].reason), "a truncated answer looks complete"
