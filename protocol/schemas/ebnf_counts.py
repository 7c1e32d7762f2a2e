"""Counts of counts in an EBNF grammar, which the grammar backend does not keep.

The backend (xgrammar 0.2.7) multiplies a range of times with the times of the part before it: `([0-9]{3}){1,2}` allows
four digits. It does so if that part is nothing but a part with times of its own, through groups and rules. An exact
number of times, `*`, `+` and `?` are kept, and so is a part with anything beside the inner count.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import Factory, define

from protocol.messages.grammars import IN_EBNF

_Part: TypeAlias = bool | str
"""Whether a part is one with times in braces; the name of a rule if that depends on the rule."""


@define(eq=False)
class _Sequence:
    """The body of a rule or of a group, as far as it has been read."""

    parts: list[_Part] = Factory(list)
    alternatives: int = 1

    @property
    def part(self) -> _Part:
        """The body as one part."""
        return self.parts[0] if self.alternatives == len(self.parts) == 1 else False


@define(eq=False)
class _Reader:
    """The rules and the counts of a grammar, as far as it has been read."""

    rules: dict[str, _Sequence] = Factory(dict)
    counts: list[tuple[str, _Part]] = Factory(list)  # ranges of times, each with the part before it
    open: list[_Sequence] = Factory(list)  # the body of the rule, and of each open group in it

    def read(self, kind: str, token: str) -> None:
        """Read the next token; a wrong one changes nothing, since the compiler has a better error."""
        if not self.open:
            return
        body = self.open[-1]
        if kind == "open":
            self.open.append(_Sequence())
        elif kind == "close" and len(self.open) > 1:
            group = self.open.pop()
            self.open[-1].parts.append(group.part)
        elif kind == "or":
            body.alternatives += 1
        elif kind == "count" and body.parts:
            if "," in token:
                self.counts.append((token, body.parts[-1]))
            body.parts[-1] = token.startswith("{")
        elif kind == "name":
            body.parts.append(token)
        elif kind in {"atom", "other"}:
            body.parts.append(False)

    def begin(self, name: str) -> None:
        """Begin a rule."""
        self.rules[name] = body = _Sequence()
        self.open = [body]


def find_count_of_count(text: str) -> str | None:
    """Return the first range of times of an EBNF grammar that is not kept, such as `{1,2}`; None if there is none."""
    reader = _Reader()
    for token in IN_EBNF.finditer(text):
        if token.lastgroup == "rule":
            reader.begin(token["rule"])
        elif token.lastgroup is not None:
            reader.read(token.lastgroup, token[0])
    decided: dict[str, bool] = {}
    return next((count for count, part in reader.counts if _is_counted(part, reader.rules, decided)), None)


def _is_counted(part: _Part, rules: dict[str, _Sequence], decided: dict[str, bool]) -> bool:
    """Return whether a part is one with times in braces, by the rules that it names; adds these to `decided`."""
    followed: dict[str, bool] = {}
    while isinstance(part, str):
        if part in decided:
            part = decided[part]
        elif part in followed or part not in rules:
            part = False
        else:
            followed[part] = False
            part = rules[part].part
    decided.update(dict.fromkeys(followed, part))
    return part
