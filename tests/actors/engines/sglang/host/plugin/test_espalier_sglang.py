"""The patches of SGLang's grammars, on grammars and requests that fail as its own do."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType, SimpleNamespace
from weakref import WeakSet

import pytest

torch = pytest.importorskip("torch")

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
    batch, results, drafts = others = [logging.getLogger(name) for name in PATCHES.ANSWER_LOGGERS]
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
    batch.error(f"Grammar preprocessing timed out: grammar_key={SECRET}, self.rid='1'")
    batch.error(f"Failed to compile regex grammar: {SECRET}, self.rid='1'")
    drafts.warning(f"Bit mask generation took 2 seconds with grammar: {SECRET}")
    results.error("the memory of a request was released twice")
    for module in (*modules, *others):
        for each in list(module.filters):
            module.removeFilter(each)
    refused, other = "a grammar was refused", ["the grammar backend is disabled"]
    said = [refused, refused, *other] * len(modules)
    assert caplog.messages == [*said, *[refused] * 4, "the memory of a request was released twice"]


class Even:
    """A grammar that allows even tokens only, and ends with the token 8; a step of it takes as long as `step_s`."""

    vocab_size = 100
    clock_s = 0.0
    step_s = 0.0
    too_slow: str

    def __init__(self) -> None:
        self.accepted_tokens: list[int] = []
        self.applied: object = None

    def is_terminated(self) -> bool:
        return 8 in self.accepted_tokens

    def accept_token(self, token: int) -> None:
        Even.clock_s += Even.step_s
        if token % 2:
            raise ValueError("not accepted")
        self.accepted_tokens.append(token)

    def fill_vocab_mask(self, mask: object, row: int) -> None:
        Even.clock_s += Even.step_s

    def apply_vocab_mask(self, logits: object, vocab_mask: object) -> None:
        self.applied = (logits, vocab_mask)


class Asked:
    """A request that is whole with its next token, as one is that draws the end of the sequence."""

    asked_tokens: int

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


class Processor:
    """Asks the grammar of each token behind `update_finish_state`."""

    def _accept_grammar_tokens(self, req: Asked, tokens: list[int]) -> list[int]:
        for token in tokens:
            req.grammar.accept_token(token)  # type: ignore[attr-defined]
        return tokens

    def _apply_prefill_grammar(self, *, req: Asked, next_token_id: int, already_advanced: bool = False) -> None:
        if not already_advanced:
            req.grammar.accept_token(next_token_id)  # type: ignore[attr-defined]

    def decode(self, req: Asked, token: int) -> object:
        """Do what SGLang does with the token of a step."""
        req.output_ids.append(token)
        req.update_finish_state()
        with suppress(ValueError):
            self._accept_grammar_tokens(req, [token])
        return req.finished_reason

    def prefill(self, req: Asked, token: int) -> object:
        """Do what SGLang does with the first token."""
        req.output_ids.append(token)
        req.update_finish_state()
        with suppress(ValueError):
            self._apply_prefill_grammar(req=req, next_token_id=token)
        return req.finished_reason


class Scheduler:
    def __init__(self, *requests: Asked, mode: str = "null") -> None:
        self.requests = requests
        self.disaggregation_mode = SimpleNamespace(value=mode)

    def _poll_timeout_aborts(self) -> list[object]:
        return ["timed out"]

    def collect_inflight_reqs(self) -> set[Asked]:
        return set(self.requests)


PATCHED = {
    Even: ("accept_token", "fill_vocab_mask", "apply_vocab_mask"),
    Asked: ("update_finish_state",),
    Processor: ("_accept_grammar_tokens", "_apply_prefill_grammar"),
    Scheduler: ("_poll_timeout_aborts",),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Even]:
    for owner, names in PATCHED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    monkeypatch.setattr(Asked, "asked_tokens", 0, raising=False)
    monkeypatch.setattr(Even, "clock_s", 0.0)
    monkeypatch.setattr(Even, "step_s", 0.001)
    slow = WeakSet[Even]()
    PATCHES.free_dead_ends(Even)
    PATCHES.fail_dead_ends(Asked, Processor, lambda *reason: reason)
    PATCHES.limit_steps(Even, 0.010, slow, clock=lambda: Even.clock_s)
    PATCHES.abort_slow(Scheduler, dict, slow)
    return slow


FAILED = ("Grammar accept_token failed", 500, "InternalServerError")


@pytest.mark.usefixtures("slow")
def test_a_row_that_allows_no_token_allows_every_token_before_one_is_drawn() -> None:
    grammar, mask = Even(), torch.tensor([[-1, 3], [0, 0], [0, 5]], dtype=torch.int32)
    grammar.apply_vocab_mask(logits="scores", vocab_mask=mask)
    assert mask.tolist() == [[-1, 3], [-1, -1], [0, 5]]
    assert grammar.applied == ("scores", mask)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("first", [False, True])
def test_a_request_fails_in_the_step_that_drew_a_token_of_which_its_grammar_allows_none(*, first: bool) -> None:
    grammar, processor = Even(), Processor()
    request = Asked(grammar)
    step = processor.prefill if first else processor.decode
    assert step(request, 3) == FAILED
    assert grammar.accepted_tokens == []
    request = Asked(grammar)
    assert step(request, 2) == "stop after 1", "an allowed token changes nothing"
    assert grammar.accepted_tokens == [2], "it was accepted once"
    assert processor.decode(request, 4) == "stop after 1"
    assert grammar.accepted_tokens == [2, 4]
    processor._accept_grammar_tokens(request, [6])  # noqa: SLF001  # a drafted token, which comes before it is an output
    assert grammar.accepted_tokens == [2, 4, 6]
    request.output_ids.append(6)
    request.to_finish = "aborted"
    assert processor.decode(request, 3) == "aborted", "who left first"


@pytest.mark.usefixtures("slow")
def test_a_grammar_is_not_asked_of_tokens_before_their_time_or_twice_or_after_its_end() -> None:
    drafted, ended, processor = Even(), Even(), Processor()
    run = [2, 4]
    assert processor._accept_grammar_tokens(Asked(drafted), run) == run  # noqa: SLF001  # as SGLang does with drafts
    assert drafted.accepted_tokens == run
    ended.accept_token(8)
    skipped, free = Asked(Even(), 3), Asked(None, 3)
    for request in (Asked(drafted, 2, 3), Asked(drafted, 3), Asked(ended, 8, 3), Asked(Even(), 101), Asked(Even(), -1)):
        request.update_finish_state(2)
        assert request.finished_reason == "stop after 2"
    skipped.update_finish_state(0)
    free.update_finish_state()
    assert (skipped.finished_reason, free.finished_reason) == ("stop after 0", "stop after 1")
    assert (drafted.accepted_tokens, ended.accepted_tokens) == (run, [8])


def test_a_request_whose_grammar_takes_too_long_is_aborted_on_all_ranks_and_no_other(
    slow: WeakSet[Even], monkeypatch: pytest.MonkeyPatch
) -> None:
    lagging, quick = Even(), Even()
    ended, leaving, wanted = Asked(lagging, 2, 2, 2), Asked(lagging, 2, 2), Asked(lagging, 2)
    ended.finished_reason = leaving.to_finish = "stop"
    requests = Asked(quick), Asked(None, 2, 2), ended, leaving, wanted
    monkeypatch.setattr(Even, "step_s", 0.004)
    for grammar in (quick, lagging) * 100:
        grammar.fill_vocab_mask(None, 0)
        grammar.accept_token(2)
    assert not slow, "each step took 8 ms"
    monkeypatch.setattr(Even, "step_s", 0.5)
    for _ in range(3):  # nothing is raised: what traverses drafted tokens catches nothing
        lagging.fill_vocab_mask(None, 0)
        lagging.accept_token(2)
    why = "the grammar takes too long for a token: one took 1000 ms, and 10 are allowed"
    reason = {"type": "abort", "status_code": 503, "message": why}
    abort = {"rid": wanted.rid, "abort_message": why, "finished_reason": reason}
    for _ in range(2):  # the first may be lost
        assert Scheduler(*requests)._poll_timeout_aborts() == ["timed out", abort]  # noqa: SLF001  # it is patched
    assert Scheduler(*requests, mode="prefill")._poll_timeout_aborts() == ["timed out"]  # noqa: SLF001  # it is patched
    wanted.to_finish = "aborted"
    assert Scheduler(*requests)._poll_timeout_aborts() == ["timed out"]  # noqa: SLF001  # it is patched


def test_a_process_whose_sglang_cannot_be_patched_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATCHES.GRAMMAR_STEP_MS, raising=False)
    PATCHES.activate()
    assert not PATCHES.active, "this process belongs to no engine of a node"
    monkeypatch.setenv(PATCHES.GRAMMAR_STEP_MS, "10")
    monkeypatch.setenv(PATCHES.BYTES_MAX, "1000")
    monkeypatch.setitem(sys.modules, "sglang.srt.constrained.base_grammar_backend", ModuleType("of another version"))
    with pytest.raises(SystemExit, match="do not fit this version of SGLang"):
        PATCHES.activate()
    assert not PATCHES.active
