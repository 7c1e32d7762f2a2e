"""The judge of answers: each is complete and right, or a right beginning with the error in which it ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable

from attrs import Factory, define, field

from protocol.errors import ERRORS_BY_CODE
from tests.system.simulator.model import BROKEN, Choice, Wanted, whole

May = Callable[[str], bool]
"""Whether a server may say this code, given what has gone wrong so far.

`unanswered` stands for closing the connection before anything was said, `cut` for ending an answer without a word.
"""


@define(eq=False)
class Heard:
    """One HTTP answer as far as it has come."""

    status: int = 0
    headers: dict[str, str] = Factory(dict)
    body: bytearray = Factory(bytearray)
    whole: bool = False  # it ended as HTTP says that it must


def http(wanted: Wanted, heard: Heard, may: May, *, stayed: bool) -> str:
    """Judge the answer to a completion, of a chat or of a text; return what became of it."""
    outcome = _http(wanted, heard, with_refusal(may, wanted), stayed=stayed)
    assert not (wanted.refused and outcome == "whole"), "what the engine refused was answered"
    return outcome


def with_refusal(may: May, wanted: Wanted) -> May:
    """Return what may be said to this request; that the engine refused it only if it does."""
    return lambda code: may(code) or (wanted.refused and code == "engine_refused")


def _http(wanted: Wanted, heard: Heard, may: May, *, stayed: bool) -> str:
    if heard.status == 0:
        return unheard("unanswered", may, stayed=stayed)
    if heard.status != 200:
        if not heard.whole:
            return unheard("cut", may, stayed=stayed)
        return error(json.loads(heard.body)["error"], may, heard)
    if wanted.stream:
        assert heard.headers["content-type"].startswith("text/event-stream")
        return _Stream(wanted, may, heard).judge(stayed=stayed)
    if not heard.whole:
        return unheard("cut", may, stayed=stayed)
    said = json.loads(heard.body)
    choices = [(_text(each), each["finish_reason"]) for each in said["choices"]]
    assert [each["index"] for each in said["choices"]] == list(range(wanted.n))
    assert choices == [(each.text, each.reason) for each in whole(wanted).choices], "a wrong answer"
    for told, should in zip(said["choices"], whole(wanted).choices, strict=True):
        scores(wanted, should, [told["logprobs"]], ended=True)
    usage(wanted, said["usage"])
    return "whole"


def _text(choice: dict) -> str:
    """Return what is said of a choice, as chat completions spell it, whole or in pieces, or as completions do."""
    spoken = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return spoken.get("content") or ""


def unheard(what: str, may: May, *, stayed: bool) -> str:
    """Judge an answer that stops without an end."""
    assert not stayed or may(what), f"{what} without a word"
    return what if stayed else "left"


def error(said: dict, may: May, heard: Heard | None = None) -> str:
    """Judge an error: one of the closed set, with its own status, and true."""
    code = said["code"]
    assert may(code), f"{code} is not true: {said['message']}"
    known = ERRORS_BY_CODE[code]
    if heard is not None:
        assert heard.status == known.http_status
        assert ("retry-after" in heard.headers) == (known.retry_after_s is not None)
    return code


def usage(wanted: Wanted, said: dict) -> None:
    """Judge what an answer that is whole says that it cost."""
    cost = whole(wanted)
    told = (said["prompt_tokens"], said["completion_tokens"], said["total_tokens"])
    should = (cost.prompt_tokens, cost.completion_tokens, cost.prompt_tokens + cost.completion_tokens)
    assert told == should, f"usage is {told}, not {should}"


def scores(wanted: Wanted, should: Choice, said: list[dict | None], *, ended: bool) -> None:
    """Judge the log probabilities of one choice: each token's own, in order, and none left out."""
    told = [token for each in said if each is not None for token in each["content"]]
    if wanted.logprobs is None:
        assert not told
        return
    assert [(bytes(each["bytes"]), each["logprob"]) for each in told] == should.scores[: len(told)]
    assert all(len(each["top_logprobs"]) == wanted.logprobs for each in told)
    if ended and should.reason == "length":
        assert len(told) == len(should.scores)
    elif ended:
        read = b"".join(bytes(each["bytes"]) for each in told).decode(errors="replace")
        assert read.startswith(should.text.rstrip(BROKEN))


@define(eq=False)
class _Stream:
    """The server-sent events of one answer."""

    wanted: Wanted
    may: May
    heard: Heard
    texts: defaultdict[int, str] = field(factory=lambda: defaultdict(str))
    reasons: dict[int, str] = Factory(dict)
    logprobs: defaultdict[int, list] = field(factory=lambda: defaultdict(list))
    usages: list[dict] = Factory(list)
    failed: str | None = None

    def judge(self, *, stayed: bool) -> str:
        *events, rest = bytes(self.heard.body).decode(errors="ignore").split("\n\n")
        done = bool(events) and events[-1] == "data: [DONE]"
        assert not (stayed and done) or self.heard.whole
        for event in events[:-1] if done else events:
            assert self.failed is None, "something follows the error"
            self._event(json.loads(event.removeprefix("data: ")))
        self._texts()
        if done:
            assert len(self.reasons) == self.wanted.n, "a choice is missing"
            assert len(self.usages) == self.wanted.usage
            assert self.failed is None
            return "whole"
        assert not self.heard.whole, "an answer that was cut looks whole"
        assert not (stayed and rest) or self.may("cut"), "half an event"
        return self.failed or unheard("cut", self.may, stayed=stayed)

    def _event(self, said: dict) -> None:
        if "error" in said:
            self.failed = error(said["error"], self.may)
            return
        if said.get("usage") is not None:
            usage(self.wanted, said["usage"])
            self.usages.append(said["usage"])
        for choice in said["choices"]:
            number = choice["index"]
            assert number not in self.reasons, "text follows the end of a choice"
            self.texts[number] += _text(choice)
            self.logprobs[number].append(choice["logprobs"])
            if choice["finish_reason"] is not None:
                self.reasons[number] = choice["finish_reason"]

    def _texts(self) -> None:
        wanted = whole(self.wanted).choices
        for number, text in self.texts.items():
            assert wanted[number].text.startswith(text), "wrong text"
            scores(self.wanted, wanted[number], self.logprobs[number], ended=number in self.reasons)
        for number, reason in self.reasons.items():
            told = (self.texts[number], reason)
            assert told == (wanted[number].text, wanted[number].reason), "a truncated answer looks complete"
