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
            "if not self.to_finish and _is_refused(self.grammar, self.output_ids):",
            "if False:",
        ),
        Bug("a request that was aborted fails at a dead end", "if not self.to_finish and _is", "if _is"),
        Bug("a token that was tried counts as accepted", "    grammar.matcher.rollback(1)\n", ""),
        Bug(
            "drafted tokens are asked for twice",
            "len(output_ids) != len(accepted) + 1 or grammar",
            "grammar",
        ),
        Bug("what comes after the end of a grammar fails", " or grammar.is_terminated():", ":"),
        Bug(
            "a slow grammar ends the scheduler where tokens are drafted",
            "            slow.add(self)\n",
            "            raise ValueError(self.too_slow)\n",
        ),
        Bug("a slow grammar is aborted again and again", "            slow.clear()\n", ""),
        Bug("all are aborted beside a slow grammar", "if each.grammar in slow and not", "if not"),
        Bug("an engine without its limits serves", "raise SystemExit(f", "print(f"),
    ),
}
