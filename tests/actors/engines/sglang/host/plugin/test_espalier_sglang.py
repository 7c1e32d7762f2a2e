"""The patches of SGLang's grammars, on grammars and requests that fail as its own do."""

from __future__ import annotations

import logging
from importlib import import_module

import pytest

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
    modules = [logging.getLogger(f"sglang.srt.constrained.{name}") for name in PATCHES.QUOTING]
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
        for each in list(module.filters):
            module.removeFilter(each)
    said = ["a grammar was refused", "a grammar was refused", "the grammar backend is disabled"]
    assert caplog.messages == said * len(modules)


class Row(list[int]):
    """The tokens that a grammar allows, a bit each."""

    def any(self) -> bool:
        return any(self)


class Path:
    """A grammar by the tokens that it allows, one after the other; -1 allows any that is drawn, 0 none."""

    dead_end: bool

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.at = 0

    def fill_vocab_mask(self, mask: list[int], row: int) -> None:
        mask[row] = Row([self.allowed[self.at]])  # type: ignore[call-overload]

    def accept_token(self, token: int) -> None:
        if not self.allowed[self.at]:
            raise ValueError("not accepted")
        self.at += 1

    def rollback(self, tokens: int) -> None:
        self.at -= tokens


class Asked:
    """A request that is whole with its next token, as one is that draws the end of the sequence."""

    def __init__(self, grammar: object) -> None:
        self.grammar = grammar
        self.to_finish: object = None
        self.finished_reason: object = None

    def update_finish_state(self, accepted: int = 1) -> None:
        self.finished_reason = self.to_finish or f"stop after {accepted}"
        self.to_finish = None


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for of, names in (Path, ("fill_vocab_mask", "accept_token", "rollback")), (Asked, ("update_finish_state",)):
        for name in names:
            monkeypatch.setattr(of, name, getattr(of, name))  # put back after the test
    PATCHES.free_dead_ends(Path)
    PATCHES.fail_dead_ends(Asked, lambda *reason: reason)


def allowed(grammar: Path) -> object:
    mask: list[object] = [None]
    grammar.fill_vocab_mask(mask, 0)  # type: ignore[arg-type]
    return mask[0]


FAILED = ("Grammar accept_token failed", 500, "InternalServerError")


@pytest.mark.usefixtures("patched")
def test_a_request_at_a_dead_end_fails_whatever_its_token_is() -> None:
    grammar = Path(3, 0)
    request = Asked(grammar)
    assert allowed(grammar) == [3]
    request.update_finish_state(1)
    assert request.finished_reason == "stop after 1", "a grammar that goes on changes nothing"
    grammar.accept_token(1)
    assert allowed(grammar) == -1, "every token is, for a draw among none ends the scheduler"
    request.update_finish_state(1)
    assert request.finished_reason == FAILED
    within = Asked(type("Reasoning", (), {"grammar": grammar})())
    within.update_finish_state()
    assert within.finished_reason == FAILED
    left = Asked(grammar)
    left.to_finish = "aborted"
    left.update_finish_state()
    assert left.finished_reason == "aborted", "who left first"
    free = Asked(None)
    free.update_finish_state()
    assert free.finished_reason == "stop after 1"


@pytest.mark.usefixtures("patched")
def test_a_dead_end_behind_drafted_tokens_ends_nothing_where_they_are_not_kept() -> None:
    grammar = Path(3, 0)
    request = Asked(grammar)
    grammar.accept_token(1)
    assert allowed(grammar) == -1
    grammar.rollback(1)
    request.update_finish_state()
    assert request.finished_reason == "stop after 1"
