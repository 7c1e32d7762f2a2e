"""Bugs that would let a grammar hold an engine, or one key's grammars hold another's."""

from __future__ import annotations

from tests.mutants.bug import Bug, Bugs

BUGS: Bugs = {
    "actors/grammars.py": (
        Bug(
            "a check goes on when nobody waits for it",
            'check.scope.cancel(reason="all who asked for',
            'str("all who asked for',
        ),
        Bug(
            "one owner may use every checker", "owner_max = max(1, self.checks_max - 1)", "owner_max = self.checks_max"
        ),
        Bug("verdicts are kept for ever", "while len(self._verdicts) > self.verdicts_max:", "while False:"),
    ),
    "protocol/grammars.py": (
        Bug("what is repeated counts once", "min(max(1, part.empties) * max(1, times), COUNT_MAX)", "1"),
    ),
    "actors/engines/sglang/host/plugin/espalier_sglang.py": (
        Bug("a dead end of a grammar ends the scheduler", "vocab_mask.masked_fill_(", "vocab_mask.masked_fill("),
        Bug(
            "a token that no grammar allows may end an answer",
            "if new_accepted_len and not self.to_finish and _has_unasked_token(self):",
            "if False:",
        ),
        Bug("a request that was aborted fails at a dead end", "and not self.to_finish and _has", "and _has"),
        Bug("a token is accepted twice", "return tokens if _was_asked(req) else", "return"),
        Bug("the first token is accepted twice", "already_advanced or _was_asked(req)", "already_advanced"),
        Bug("drafted tokens are taken as asked for", "return 0 < asked ==", "return asked =="),
        Bug(
            "tokens drafted behind another are not accepted",
            "asked, req.asked_tokens = req.asked_tokens, 0",
            "asked = req.asked_tokens",
        ),
        Bug("drafted tokens are asked for twice", "len(req.output_ids) != len(accepted) + 1 or req", "req"),
        Bug("what comes after the end of a grammar fails", " or req.grammar.is_terminated():", ":"),
        Bug(
            "scores that are no numbers are the client's fault",
            "return 0 <= req.output_ids[-1] < req",
            "return -9 < req",
        ),
        Bug(
            "a slow grammar ends the scheduler where tokens are drafted",
            "            slow.add(self)\n",
            "            raise ValueError(self.too_slow)\n",
        ),
        Bug("a slow grammar is aborted again and again", "in slow and req.to_finish is None and", "in slow and"),
        Bug("all are aborted beside a slow grammar", "if req.grammar in slow and", "if"),
        Bug(
            "a prefill breaks off the hand-off", 'if slow and self.disaggregation_mode.value != "prefill":', "if slow:"
        ),
        Bug(
            "an engine without its limits serves",
            'raise SystemExit(f"the limits of grammars do not fit this version of SGLang: {error!r}") from error',
            "pass",
        ),
    ),
}
