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
        Bug("a dead end of a grammar ends the scheduler", "vocab_mask[idx] = -1", "pass"),
        Bug(
            "a token that no grammar allows may end an answer",
            'if getattr(grammar, "dead_end", False) and not',
            "if False and not",
        ),
        Bug(
            "a dead end behind drafted tokens fails the answer",
            "undo(self, k)\n        self.dead_end = False",
            "undo(self, k)",
        ),
        Bug(
            "an answer that thinks ends at a dead end as any",
            'getattr(self.grammar, "grammar", self.grammar)',
            "self.grammar",
        ),
    ),
}
