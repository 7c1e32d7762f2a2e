"""The patches of SGLang's grammars, on grammars and requests that fail as its own do."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType
from weakref import WeakSet

import pytest
import torch

PATCHES = import_module("actors.engines.sglang.host.plugin.espalier_sglang")
SECRET = "the client's own grammar"


class Grammar:
    """A grammar that allows even tokens only, and quotes itself as SGLang's do."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_token(self, token: int) -> None:
        if token % 2:
            raise ValueError(f"Tokens not accepted: {token}\nKey string: {SECRET}")
        self.accepted.append(token)


def test_a_grammar_that_fails_is_in_no_log_and_in_no_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grammar, "accept_token", Grammar.accept_token)  # put back after the test
    modules = [logging.getLogger(name) for name in PATCHES.GRAMMAR_LOGGERS]
    *_, results, drafts = others = [logging.getLogger(name) for name in PATCHES.ANSWER_LOGGERS]
    PATCHES.hide_grammars(Grammar)
    grammar = Grammar()
    grammar.accept_token(2)
    with pytest.raises(ValueError, match=r"^the grammar does not allow this token$") as caught:
        grammar.accept_token(3)
    assert grammar.accepted == [2]
    assert caught.value.__suppress_context__, "a traceback has the sentence of SGLang otherwise"
    for module in modules:
        module.error(f"Hit invalid regex: key_string={SECRET!r}")  # as SGLang has it
        module.warning("Skip unsupported key_type=%r, key_string=%r", "regex", SECRET)
        module.warning("the grammar backend is disabled")
    results.error(f"Grammar accept_token failed for req 1 with token {SECRET}: no")
    drafts.warning(f"Bit mask generation took 2 seconds with grammar: {SECRET}")
    results.error("the memory of a request was released twice")
    for module in (*modules, *others):
        for each in list(module.filters):
            module.removeFilter(each)
    refused, other = "a grammar was refused", ["the grammar backend is disabled"]
    said = [refused, refused, *other] * len(modules)
    assert caplog.messages == [*said, refused, refused, "the memory of a request was released twice"]


class Matcher:
    """What computes a grammar that allows even tokens only; the token 8 ends it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def accept_token(self, token: int) -> bool:
        if token % 2 == 0:
            self.tokens.append(token)
        return token % 2 == 0

    def rollback(self, tokens: int) -> None:
        del self.tokens[-tokens:]


class Even:
    """A grammar around its matcher, as SGLang's; a step of it takes as long as `clock_s` says."""

    clock_s = 0.0
    step_s = 0.0
    too_slow: str

    def __init__(self) -> None:
        self.matcher = Matcher()
        self.accepted_tokens: list[int] = []
        self.applied: object = None

    def is_terminated(self) -> bool:
        return 8 in self.matcher.tokens

    def accept_token(self, token: int) -> None:
        Even.clock_s += Even.step_s
        if not self.matcher.accept_token(token):
            raise ValueError("not accepted")
        self.accepted_tokens.append(token)

    def fill_vocab_mask(self, mask: object, row: int) -> None:
        Even.clock_s += Even.step_s

    def apply_vocab_mask(self, logits: object, vocab_mask: object) -> None:
        self.applied = (logits, vocab_mask)


class Asked:
    """A request that is whole with its next token, as one is that draws the end of the sequence."""

    def __init__(self, grammar: object, *output_ids: int) -> None:
        self.grammar = grammar
        self.output_ids = list(output_ids)
        self.rid = str(len(output_ids))
        self.to_finish: object = None
        self.finished_reason: object = None

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self, new_accepted_len: int = 1) -> None:
        self.finished_reason = self.to_finish or f"stop after {new_accepted_len}"
        self.to_finish = None


class Scheduler:
    def __init__(self, *requests: Asked) -> None:
        self.requests = requests

    def _poll_timeout_aborts(self) -> list[object]:
        return ["timed out"]

    def collect_inflight_reqs(self) -> set[Asked]:
        return set(self.requests)


PATCHED = {
    Even: ("accept_token", "fill_vocab_mask", "apply_vocab_mask"),
    Asked: ("update_finish_state",),
    Scheduler: ("_poll_timeout_aborts",),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Even]:
    for owner, names in PATCHED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    monkeypatch.setattr(Even, "clock_s", 0.0)
    monkeypatch.setattr(Even, "step_s", 0.001)
    slow = WeakSet[Even]()
    PATCHES.free_dead_ends(Even)
    PATCHES.fail_dead_ends(Asked, lambda *reason: reason)
    PATCHES.limit_steps(Even, 0.010, slow, clock=lambda: Even.clock_s)
    PATCHES.abort_slow(Scheduler, lambda *, rid, abort_message: (rid, abort_message), slow)
    return slow


FAILED = ("Grammar accept_token failed", 500, "InternalServerError")


@pytest.mark.usefixtures("slow")
def test_a_row_that_allows_no_token_allows_every_token_before_one_is_drawn() -> None:
    grammar, mask = Even(), torch.tensor([[-1, 3], [0, 0], [0, 5]], dtype=torch.int32)
    grammar.apply_vocab_mask(logits="scores", vocab_mask=mask)
    assert mask.tolist() == [[-1, 3], [-1, -1], [0, 5]]
    assert grammar.applied == ("scores", mask)


@pytest.mark.usefixtures("slow")
def test_a_request_fails_in_the_step_that_drew_a_token_of_which_its_grammar_allows_none() -> None:
    grammar = Even()
    request = Asked(grammar, 2)
    request.update_finish_state()
    assert request.finished_reason == "stop after 1", "an allowed token changes nothing"
    assert (grammar.matcher.tokens, grammar.accepted_tokens) == ([], []), "it was only tried"
    grammar.accept_token(2)
    request.output_ids.append(3)
    request.update_finish_state(1)
    assert request.finished_reason == FAILED
    request.to_finish = "aborted"
    request.update_finish_state()
    assert request.finished_reason == "aborted", "who left first"


@pytest.mark.usefixtures("slow")
def test_no_grammar_is_asked_of_a_token_that_it_has_had_or_that_comes_after_its_end() -> None:
    drafted, ended = Even(), Even()
    for token in (2, 4):
        drafted.accept_token(token)  # SGLang asks it of drafted tokens before it looks whether they end the answer
    ended.accept_token(8)
    reasoning = type("Reasoning", (), {"grammar": Even()})()
    for request in (Asked(drafted, 2, 3), Asked(drafted, 3), Asked(ended, 8, 3), Asked(None, 3), Asked(reasoning, 3)):
        request.update_finish_state(2)
        assert request.finished_reason == "stop after 2"


def test_a_request_whose_grammar_takes_too_long_is_aborted_on_all_ranks_and_no_other(
    slow: WeakSet[Even], monkeypatch: pytest.MonkeyPatch
) -> None:
    lagging, quick = Even(), Even()
    scheduler = Scheduler(Asked(quick), Asked(lagging, 2), Asked(None, 2, 2), ended := Asked(lagging, 2, 2, 2))
    ended.finished_reason = "stop"
    monkeypatch.setattr(Even, "step_s", 0.004)
    for grammar in (quick, lagging) * 100:
        grammar.fill_vocab_mask(None, 0)
        grammar.accept_token(2)
    assert not slow, "each step took 8 ms"
    monkeypatch.setattr(Even, "step_s", 0.5)
    for _ in range(3):  # nothing is raised: what traverses drafted tokens catches nothing
        lagging.fill_vocab_mask(None, 0)
        lagging.accept_token(2)
    assert scheduler._poll_timeout_aborts() == [  # noqa: SLF001 - the method that is patched
        "timed out",
        ("1", "the grammar takes too long for a token: one took 1000 ms, and 10 are allowed"),
    ]
    assert scheduler._poll_timeout_aborts() == ["timed out"]  # noqa: SLF001 - the method that is patched


def test_a_process_whose_sglang_cannot_be_patched_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATCHES.GRAMMAR_STEP_MS, raising=False)
    PATCHES.activate()  # of no engine of a node
    monkeypatch.setenv(PATCHES.GRAMMAR_STEP_MS, "10")
    monkeypatch.setenv(PATCHES.BYTES_MAX, "1000")
    monkeypatch.setitem(sys.modules, "sglang.srt.constrained.base_grammar_backend", ModuleType("of another version"))
    with pytest.raises(SystemExit, match="do not fit this version of SGLang"):
        PATCHES.activate()
