"""The patches of SGLang's grammars, on grammars that fail as its own do: nothing of them is logged."""

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
