"""What can be said of a grammar by reading it: the cheap part of keeping one from holding an engine.

It looks for the few shapes that are always dear, wherever in a grammar they stand, and takes time in proportion to the
grammar's length. What it lets pass is compiled and walked before an engine sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from attrs import Factory, define, field

from protocol.messages import Grammar, GrammarKind

WORDS = {
    GrammarKind.JSON_SCHEMA: "this JSON schema",
    GrammarKind.REGEX: "this regular expression",
    GrammarKind.EBNF: "this EBNF grammar",
    GrammarKind.STRUCTURAL_TAG: "this structural tag",
}
WITHIN = {GrammarKind.REGEX: "a regular expression", GrammarKind.EBNF: "an EBNF grammar"}
FORMATS = {"regex": GrammarKind.REGEX, "grammar": GrammarKind.EBNF}  # the types of them in a structural tag
EMPTIES_MAX = 200  # parts in a row that may each be empty: a step costs their square
COUNT_MAX = 100_000  # of repetitions, those of repetitions multiplied
DEPTH_MAX = 200  # of groups
PASSES_MAX = 8  # over rules, to find those that may be empty because those that they are made of may

_COUNT = r"[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\}"
_IN_REGEX = re.compile(
    r"(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))|(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?)|(?P<close>\))|(?P<or>\|)"
    rf"|(?P<count>{_COUNT})|(?P<edge>[\^$])|(?P<other>.)",
    re.DOTALL,
)
_IN_EBNF = re.compile(
    r'(?P<rule>[\w.-]+)\s*::=|(?P<empty>""|\'\')|(?P<atom>"(?:\\.|[^"\\])*(?:"|\Z)|\'(?:\\.|[^\'\\])*(?:\'|\Z)|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))'
    rf"|(?P<open>\()|(?P<close>\))|(?P<or>\|)|(?P<count>{_COUNT})|(?P<name>[\w.-]+)|#[^\n]*|\s+|(?P<other>.)",
    re.DOTALL,
)

_FORMATS = re.compile(rf'"(?:{"|".join(FORMATS)})"')  # one without them need not be parsed


@define
class _Part:
    """Something that stands in a row: whether it may be empty, how many such it is made of, how often it repeats."""

    empty: bool
    empties: int = 0
    count: int = 1


@define(eq=False)
class _Group:
    """What is between two parentheses, or a rule's body, as far as it has been read."""

    empty: bool = False  # one of its choices may be
    empties: int = 0
    count: int = 1
    _row_empty: bool = True
    _row: int = 0
    _last: _Part | None = None

    def add(self, part: _Part) -> None:
        """Take the next part of the row."""
        self._settle()
        self._last = part

    def repeat(self, least: int, most: int | None) -> None:
        """Repeat the last part; `most` None: without end."""
        if (part := self._last) is None:
            return
        times = least if most is None else most
        if part.empty:  # each of the repetitions may be
            part.empties = min(max(1, part.empties) * max(1, times), COUNT_MAX)
        part.count *= max(1, times)
        part.empty = part.empty or least == 0
        if part.empty:
            part.empties = max(1, part.empties)

    def next_choice(self) -> None:
        """Begin another choice."""
        self._settle()
        self.empty = self.empty or self._row_empty
        self._row, self._row_empty = 0, True

    def ended(self) -> _Part:
        """Return the whole as one part."""
        self.next_choice()
        return _Part(self.empty, self.empties, self.count)

    def _settle(self) -> None:
        part, self._last = self._last, None
        if part is None:
            return
        self.count = max(self.count, part.count)
        self._row_empty = self._row_empty and part.empty
        self._row = self._row + max(1, part.empties) if part.empty else 0
        self.empties = max(self.empties, self._row, part.empties)


def grammar_kinds(grammar: Grammar) -> list[GrammarKind]:
    """Return the kind of a grammar, and before it those of regular expressions and EBNF grammars in a structural tag.

    Patterns in a JSON schema are the schema's own.
    """
    if grammar.kind is not GrammarKind.STRUCTURAL_TAG or not _FORMATS.search(grammar.text):
        return [grammar.kind]
    named = (value.get("type") for value in _objects(grammar.text))
    found = dict.fromkeys(FORMATS[name] for name in named if isinstance(name, str) and name in FORMATS)
    return [*found, grammar.kind]


def find_mistake(grammar: Grammar) -> str | None:
    """Return what is wrong with a grammar as a sentence for its author, None if nothing can be seen."""
    for kind, text in _texts(grammar):
        said = _of_ebnf(text) if kind is GrammarKind.EBNF else _of_regex(text)
        if said is not None:
            within = "" if kind is grammar.kind else f" because of {WITHIN[kind]} in it"
            return f"{WORDS[grammar.kind]} cannot be used{within}: {said}"
    return None


def _texts(grammar: Grammar) -> Iterator[tuple[GrammarKind, str]]:
    """Yield the regular expressions and EBNF grammars that a grammar is or holds."""
    if grammar.kind in {GrammarKind.REGEX, GrammarKind.EBNF}:
        yield grammar.kind, grammar.text
        return
    for value in _objects(grammar.text):
        if isinstance(pattern := value.get("pattern"), str):
            yield GrammarKind.REGEX, pattern
        if isinstance(rules := value.get("grammar"), str) and value.get("type") == "grammar":
            yield GrammarKind.EBNF, rules
        if isinstance(patterns := value.get("patternProperties"), dict):
            yield from ((GrammarKind.REGEX, str(each)) for each in patterns)


def _objects(text: str) -> Iterator[dict[str, object]]:
    """Yield every object in a JSON text; none of a text that is no JSON, which whoever compiles it says better."""
    try:
        waiting: list[object] = [json.loads(text)]
    except (ValueError, RecursionError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            yield value


def _of_regex(text: str) -> str | None:
    groups = [_Group()]
    for token in _IN_REGEX.finditer(text):
        if token.lastgroup == "edge":
            continue
        if not _read(groups, str(token.lastgroup), token[0]):
            return f"its groups are nested more than {DEPTH_MAX} deep"
    while len(groups) > 1:  # one that is not closed is somebody else's to refuse
        _close(groups)
    return _dear(groups[0].ended())


def _of_ebnf(text: str) -> str | None:
    empty: set[str] = set()
    for _ in range(PASSES_MAX):
        known = len(empty)
        if (said := _Rules(empty).read(text)) is not None or len(empty) == known:
            return said
    return None


@define(eq=False)
class _Rules:
    """The rules of one EBNF grammar, read once; those that may be empty are added to `empty`."""

    empty: set[str]
    _name: str = ""  # of the rule that is being read
    _groups: list[_Group] = field(factory=lambda: [_Group()])
    _choice: list[str] = Factory(list)  # the rules in it, and "" for each text that is not empty
    _beside_itself: bool = False

    def read(self, text: str) -> str | None:
        """Return what is wrong with the first rule that is dear."""
        for token in _IN_EBNF.finditer(text):
            kind = token.lastgroup
            if kind == "rule":
                if (said := self._end()) is not None:
                    return said
                self._name = token["rule"]
            elif kind is not None and not self._take(kind, token[0]):
                return f"its groups are nested more than {DEPTH_MAX} deep"
        return self._end()

    def _take(self, kind: str, text: str) -> bool:
        if kind == "name":
            self._groups[-1].add(_Part(text in self.empty, int(text in self.empty)))
        elif not _read(self._groups, kind, text):
            return False
        if kind == "or" and len(self._groups) == 1:
            self._end_choice()
        elif kind in {"name", "atom"}:
            self._choice.append(text if kind == "name" else "")
        return True

    def _end_choice(self) -> None:
        name, choice = self._name, self._choice
        if choice.count(name) > 1 and all(each in self.empty or each == name for each in choice):
            self._beside_itself = True
        self._choice = []

    def _end(self) -> str | None:
        """End the rule that is being read."""
        while len(self._groups) > 1:
            _close(self._groups)
        self._end_choice()
        whole, beside_itself, name = self._groups[0].ended(), self._beside_itself, self._name
        self._groups, self._beside_itself = [_Group()], False
        if whole.empty and name:
            self.empty.add(name)
        if beside_itself and name in self.empty:
            return f"its rule {name} may be empty, and stands beside itself, so there is no end of ways to read a text"
        return _dear(whole)


def _read(groups: list[_Group], kind: str, text: str) -> bool:
    """Take one token; return whether the nesting is still within its limit."""
    match kind:
        case "open":
            groups.append(_Group())
        case "close":
            _close(groups)
        case "or":
            groups[-1].next_choice()
        case "count":
            groups[-1].repeat(*_bounds(text))
        case _:
            groups[-1].add(_Part(kind == "empty"))
    return len(groups) <= DEPTH_MAX + 1  # the first is the whole


def _close(groups: list[_Group]) -> None:
    if len(groups) > 1:
        part = groups.pop().ended()
        groups[-1].add(part)


def _bounds(count: str) -> tuple[int, int | None]:
    if not count.startswith("{"):
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[count]
    least, comma, most = count[1:-1].partition(",")
    low = int(least[:9] or 0)
    return low, (int(most[:9]) if most else None) if comma else low


def _dear(whole: _Part) -> str | None:
    if whole.empties > EMPTIES_MAX:
        return f"it has {whole.empties:,} parts in a row that may each be empty, and {EMPTIES_MAX} are allowed"
    if whole.count > COUNT_MAX:
        return f"its repetitions of repetitions come to {whole.count:,}, and {COUNT_MAX:,} are allowed"
    return None
