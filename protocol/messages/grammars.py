"""Static check of a grammar: the cheap one of two checks that keep a grammar from blocking an engine.

An engine compiles the grammar of a request and follows it at every step of the whole batch, so one costly grammar
delays all other requests. This file finds a few shapes that are always costly, anywhere in a grammar, in time
proportional to its length. It never proves a grammar cheap: a grammar without these shapes is compiled and walked in a
process of its own before an engine gets it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from attrs import Factory, define, field

from protocol.messages.generation import Grammar, GrammarKind

WORDS = {
    GrammarKind.JSON_SCHEMA: "this JSON schema",
    GrammarKind.REGEX: "this regular expression",
    GrammarKind.EBNF: "this EBNF grammar",
    GrammarKind.STRUCTURAL_TAG: "this structural tag",
}
WITHIN = {GrammarKind.REGEX: "a regular expression", GrammarKind.EBNF: "an EBNF grammar"}
FORMATS = {"regex": GrammarKind.REGEX, "grammar": GrammarKind.EBNF}  # keys: `type` in a structural tag
EMPTIES_MAX = 200  # consecutive parts that may each be empty: a step costs their square
COUNT_MAX = 100_000  # repetitions; nested ones multiply
DEPTH_MAX = 200  # nested groups
PASSES_MAX = 8  # passes over the rules: each finds more rules whose parts may all be empty

_COUNT = r"[*+?]|\{\d+(?:,\d*)?\}|\{,\d+\}"
_IN_REGEX = re.compile(
    r"(?P<atom>\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))|(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?)|(?P<close>\))|(?P<or>\|)"
    rf"|(?P<count>{_COUNT})|(?P<edge>[\^$])|(?P<other>.)",
    re.DOTALL,
)
IN_EBNF = re.compile(
    r'(?P<rule>[\w.-]+)\s*::=|(?P<empty>""|\'\')|(?P<atom>"(?:\\.|[^"\\])*(?:"|\Z)|\'(?:\\.|[^\'\\])*(?:\'|\Z)|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))'
    rf"|(?P<open>\()|(?P<close>\))|(?P<or>\|)|(?P<count>{_COUNT})|(?P<name>[\w.-]+)|#[^\n]*|\s+|(?P<other>.)",
    re.DOTALL,
)

_FORMATS = re.compile(rf'"(?:{"|".join(FORMATS)})"')  # a structural tag without any need not be parsed


@define
class _Part:
    """One part of a sequence: whether it may be empty, its run of consecutive empty parts, and its repetitions."""

    empty: bool
    empties: int = 0
    count: int = 1


@define(eq=False)
class _Group:
    """The text between two parentheses, or the body of a rule, as far as it has been read."""

    empty: bool = False  # whether one of its alternatives may be
    empties: int = 0
    count: int = 1
    _sequence_empty: bool = True  # whether every part of the alternative so far may be empty
    _consecutive: int = 0  # parts at its end that may each be empty
    _last: _Part | None = None

    def add(self, part: _Part) -> None:
        """Add the next part of the sequence."""
        self._settle()
        self._last = part

    def repeat(self, least: int, most: int | None) -> None:
        """Repeat the last part; `most` is None if there is no limit."""
        if (part := self._last) is None:
            return
        times = least if most is None else most
        if part.empty:  # then each of its repetitions may be
            part.empties = min(max(1, part.empties) * max(1, times), COUNT_MAX)
        part.count *= max(1, times)
        part.empty = part.empty or least == 0
        if part.empty:
            part.empties = max(1, part.empties)

    def next_alternative(self) -> None:
        """Begin another alternative."""
        self._settle()
        self.empty = self.empty or self._sequence_empty
        self._consecutive, self._sequence_empty = 0, True

    def ended(self) -> _Part:
        """Return the group as one part."""
        self.next_alternative()
        return _Part(self.empty, self.empties, self.count)

    def _settle(self) -> None:
        part, self._last = self._last, None
        if part is None:
            return
        self.count = max(self.count, part.count)
        self._sequence_empty = self._sequence_empty and part.empty
        self._consecutive = self._consecutive + max(1, part.empties) if part.empty else 0
        self.empties = max(self.empties, self._consecutive, part.empties)


def grammar_kinds(grammar: Grammar) -> list[GrammarKind]:
    """Return the kind of a grammar, after the kinds of regular expressions and EBNF grammars in a structural tag.

    Patterns in a JSON schema count as part of the schema.
    """
    if grammar.kind is not GrammarKind.STRUCTURAL_TAG or not _FORMATS.search(grammar.text):
        return [grammar.kind]
    named = (value.get("type") for value in _objects(grammar.text))
    inner = dict.fromkeys(FORMATS[name] for name in named if isinstance(name, str) and name in FORMATS)
    return [*inner, grammar.kind]


def find_mistake(grammar: Grammar) -> str | None:
    """Return the first costly shape of a grammar as a sentence for its author, None if there is none."""
    for kind, text in _texts(grammar):
        mistake = _ebnf_mistake(text) if kind is GrammarKind.EBNF else _regex_mistake(text)
        if mistake is not None:
            within = "" if kind is grammar.kind else f" because of {WITHIN[kind]} in it"
            return f"{WORDS[grammar.kind]} cannot be used{within}: {mistake}"
    return None


def _texts(grammar: Grammar) -> Iterator[tuple[GrammarKind, str]]:
    """Yield the regular expressions and EBNF grammars of a grammar, itself or its parts."""
    if grammar.kind in {GrammarKind.REGEX, GrammarKind.EBNF}:
        yield grammar.kind, grammar.text
        return
    for value in _objects(grammar.text):
        if isinstance(pattern := value.get("pattern"), str):
            yield GrammarKind.REGEX, pattern
        if isinstance(rules := value.get("grammar"), str) and value.get("type") == "grammar":
            yield GrammarKind.EBNF, rules
        if isinstance(patterns := value.get("patternProperties"), dict):
            yield from ((GrammarKind.REGEX, str(pattern)) for pattern in patterns)


def _objects(text: str) -> Iterator[dict[str, object]]:
    """Yield every object in a JSON text; none for invalid JSON, since the compiler has a better error."""
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


def _regex_mistake(text: str) -> str | None:
    groups = [_Group()]
    for token in _IN_REGEX.finditer(text):
        if token.lastgroup == "edge":
            continue
        if not _read_token(groups, str(token.lastgroup), token[0]):
            return f"its groups are nested more than {DEPTH_MAX} deep"
    while len(groups) > 1:  # an unclosed one: the compiler refuses it
        _close(groups)
    return _limit_exceeded(groups[0].ended())


def _ebnf_mistake(text: str) -> str | None:
    empty: set[str] = set()
    for _ in range(PASSES_MAX):
        before = len(empty)
        if (mistake := _Rules(empty).read(text)) is not None or len(empty) == before:
            return mistake
    return None


@define(eq=False)
class _Rules:
    """One pass over the rules of an EBNF grammar; adds the names of possibly empty rules to `empty`."""

    empty: set[str]
    _name: str = ""  # the rule at hand
    _groups: list[_Group] = field(factory=lambda: [_Group()])
    _alternative: list[str] = Factory(list)  # the names of its rules, and "" for each text that is not empty
    _repeats_itself: bool = False  # an alternative has the rule twice, and otherwise only parts that may be empty

    def read(self, text: str) -> str | None:
        """Return the sentence for the first costly rule, None if there is none."""
        for token in IN_EBNF.finditer(text):
            kind = token.lastgroup
            if kind == "rule":
                if (mistake := self._end()) is not None:
                    return mistake
                self._name = token["rule"]
            elif kind is not None and not self._read_token(kind, token[0]):
                return f"its groups are nested more than {DEPTH_MAX} deep"
        return self._end()

    def _read_token(self, kind: str, text: str) -> bool:
        if kind == "name":
            self._groups[-1].add(_Part(text in self.empty, int(text in self.empty)))
        elif not _read_token(self._groups, kind, text):
            return False
        if kind == "or" and len(self._groups) == 1:
            self._end_alternative()
        elif kind in {"name", "atom"}:
            self._alternative.append(text if kind == "name" else "")
        return True

    def _end_alternative(self) -> None:
        name, rules = self._name, self._alternative
        if rules.count(name) > 1 and all(rule in self.empty or rule == name for rule in rules):
            self._repeats_itself = True
        self._alternative = []

    def _end(self) -> str | None:
        """End the rule at hand; return its sentence if it is costly."""
        while len(self._groups) > 1:
            _close(self._groups)
        self._end_alternative()
        whole, repeats_itself, name = self._groups[0].ended(), self._repeats_itself, self._name
        self._groups, self._repeats_itself = [_Group()], False
        if whole.empty and name:
            self.empty.add(name)
        if repeats_itself and name in self.empty:
            return f"its rule {name} may be empty, and stands beside itself, so there is no end of ways to read a text"
        return _limit_exceeded(whole)


def _read_token(groups: list[_Group], kind: str, text: str) -> bool:
    """Apply one token; return whether the nesting is still within its limit."""
    match kind:
        case "open":
            groups.append(_Group())
        case "close":
            _close(groups)
        case "or":
            groups[-1].next_alternative()
        case "count":
            groups[-1].repeat(*_bounds(text))
        case _:
            groups[-1].add(_Part(kind == "empty"))
    return len(groups) <= DEPTH_MAX + 1  # the first group is the whole text


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


def _limit_exceeded(whole: _Part) -> str | None:
    if whole.empties > EMPTIES_MAX:
        return f"it has {whole.empties:,} parts in a row that may each be empty, and {EMPTIES_MAX} are allowed"
    if whole.count > COUNT_MAX:
        return f"its repetitions of repetitions come to {whole.count:,}, and {COUNT_MAX:,} are allowed"
    return None
