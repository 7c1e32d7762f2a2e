"""The parameters of a function apart from each other, for formats of calls that write each one by itself.

Some models write a string argument as plain text and other values as JSON. So each parameter has its strings as regular
expressions of plain text, and its other values as a schema for the engine's grammar backend. Other models write all
values as JSON. As with whole schemas, no more is allowed than the client's schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal

from attrs import Factory, evolve, frozen

from protocol.schemas.beginnings import beginning_with, begun
from protocol.schemas.characters import CharacterSet, characters, complement, intersection, union
from protocol.schemas.documents import Document, SchemaNode
from protocol.schemas.engine_schema import EngineSchema
from protocol.schemas.expression_text import in_text
from protocol.schemas.expressions import EMPTY, NOTHING, Alternation, Chars, Expression, Repeat
from protocol.schemas.expressions import Sequence as Parts
from protocol.schemas.graph import Graph, culprit
from protocol.schemas.lengths import simplified
from protocol.schemas.shapes import AnyValue, Constant, Map, Number, Object, Shape, String, Values

SPACES = characters(" \t\n\r")
ANY_NAME = "[A-Za-z0-9_.-]{1,64}"
NAME_CHARACTERS_MAX = 256
NO_SUCH_STRING = "the calls of this model have no form for its strings, which read as other values"
# The characters with which numbers, and with which `true` and `false` begin; some models write words as Python does.
NUMBERS, WORDS = "-0123456789", "tfTF"
JSON_WORDS = ("true", "false", "null")
FIRST = {"integer": NUMBERS, "number": NUMBERS, "boolean": WORDS, "null": "nN", "array": "[", "object": "{"}


@frozen
class ParameterNames:
    """The names of parameters that a format can write."""

    without: str  # the characters that end a name
    no_such_name: str  # why another name is refused
    empty: bool = True  # a name may have no characters
    escaped: str = ""  # the characters that a name has in another form, which an expression of names cannot match

    def has(self, name: str) -> bool:
        """Return whether a name can be written."""
        return len(name) <= NAME_CHARACTERS_MAX and set(name).isdisjoint(self.without) and (self.empty or bool(name))


NAMES_IN_TAGS = ParameterNames(
    '<>"\n',
    f'a name with <, >, " or a line break, or of more than {NAME_CHARACTERS_MAX} characters, cannot be written',
)
"""The names of formats that write each parameter between tags."""


@frozen
class Parameter:
    """The values of one parameter, or of several whose names match an expression.

    The strings are regular expressions of plain text, or any. None is for no value of a kind.
    """

    name: str | None  # None: `least` to `most` parameters whose names match `names`
    required: bool
    strings: tuple[str, ...] | Literal["any"] | None
    others: str | None  # the schema of the values that are no strings
    whole: str  # the schema of all values
    names: str = ""
    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()  # those of `true`, `false` and `null` that are values
    types: frozenset[str] = frozenset()  # of the values that are no strings


def parameters(
    text: str,
    without: str | None,
    pause: Callable[[], object] = bool,
    types_of: Callable[[str], AbstractSet[str]] = lambda _: frozenset(),
    names: ParameterNames = NAMES_IN_TAGS,
    *,
    typed: bool = False,
) -> list[list[Parameter]]:
    """Return the parameters of each kind of object that a schema allows, in the order in which they are written.

    The strings of regular expressions have none of the characters `without`, unless an expression names one by itself;
    None is for a format whose strings are JSON, too. A name is one of `names`, or refused.
    The parser reads a parameter by `types_of` its name, so strings that are JSON of another type are left out; not in a
    `typed` format, where a value says whether it is a string.
    The schemas of all of them together are as bounded as one for an engine. `pause` is called before each
    of them. Raises `Unenforceable` if no engine can be held to the schema.
    """
    document = Document.parse(text)
    graph = Graph(document)
    graph.fill()
    allowed = None if without is None else complement(characters(without))
    read_as = None if typed else types_of
    writer = _Writer(graph, document.root, allowed, EngineSchema(graph), pause, read_as, names)
    kinds = [kind for shape in graph.shapes[(document.root,)] for kind in writer.kinds(shape)]
    if not kinds:
        document.root.refuse(culprit(document.root), "it allows no object")
    # A parameter without a value is left out, and an object that has to have it.
    written = [[each for each in kind if not writer.lacks_values(each)] for kind in kinds if not writer.is_lost(kind)]
    if not written:
        name = next(each.name for each in kinds[0] if writer.lacks_values(each))
        document.root.refuse("properties", f"{json.dumps(name)}: {NO_SUCH_STRING}")
    return written


@frozen
class _Written:
    """The values of a parameter, see `Parameter`."""

    strings: tuple[str, ...] | Literal["any"] | None
    others: str | None
    whole: str
    words: tuple[str, ...]
    types: frozenset[str]

    @property
    def patterns(self) -> tuple[str, ...]:
        """The regular expressions of the strings."""
        return self.strings if isinstance(self.strings, tuple) else ()

    @property
    def size(self) -> int:
        """The number of characters."""
        return sum(map(len, self.patterns)) + len(self.others or "") + len(self.whole)


@frozen
class _Writer:
    graph: Graph
    root: SchemaNode
    allowed: CharacterSet | None  # of strings as plain text; None for strings that are JSON
    schemas: EngineSchema
    pause: Callable[[], object]
    types_of: Callable[[str], AbstractSet[str]] | None  # None if a value says whether it is a string
    named: ParameterNames
    # By the shapes of the values, which many kinds of objects may have, and the types by which they are read.
    _values: dict[tuple[tuple[Shape, ...], AbstractSet[str]], _Written] = Factory(dict)

    def kinds(self, shape: Shape) -> Iterator[list[Parameter]]:
        """Yield the lists of parameters of the objects of a shape."""
        match shape:
            case Object(properties, required, least, most):
                names = [name for name, _ in properties]
                # Which of the others are there cannot be counted here: some are required, some are left out.
                optional = [name for name in names if name not in required]
                needed = required | set(optional[: max(0, least - len(required))])
                spare = len(names) if most is None else max(0, most - len(needed))
                kept = needed | set([name for name in optional if name not in needed][:spare])
                yield [
                    self._parameter(name, self.graph.shapes[child], required=name in needed)
                    for name, child in properties
                    if name in kept
                ]
            case Map(names, values, least, most):
                own = self._parameter(None, self.graph.shapes[values], required=False)
                written = ANY_NAME if names is None else in_text(self._names(names))
                yield [evolve(own, names=written, least=least, most=most)]
            case Values(texts):
                for value in map(json.loads, texts):
                    if isinstance(value, dict):
                        each = {name: Values((json.dumps(one),)) for name, one in value.items()}
                        yield [self._parameter(name, [one], required=True) for name, one in each.items()]
            case _:
                return

    def lacks_values(self, parameter: Parameter) -> bool:
        """Return whether the values of a parameter are strings alone that its parser reads as other values."""
        if self.allowed is None or self.types_of is None or parameter.name is None:
            return False
        return parameter.strings is parameter.others is None and "string" in self.types_of(parameter.name)

    def is_lost(self, kind: Sequence[Parameter]) -> bool:
        """Return whether no object of a kind can be written."""
        return any(each.required and self.lacks_values(each) for each in kind)

    def _names(self, tree: Expression) -> Expression:
        """Return the expression of the names of parameters without the characters that end one."""
        without = complement(characters(self.named.without + self.named.escaped))
        kept = simplified(_restricted(tree, without, strictly=True))
        if not self.named.empty:
            kept = simplified(begun(kept, complement(())))
        if kept == NOTHING:
            self.root.refuse("patternProperties", self.named.no_such_name)
        return kept

    def _parameter(self, name: str | None, shapes: Sequence[Shape], *, required: bool) -> Parameter:
        if name is not None and not self.named.has(name):
            self.root.refuse("properties", f"{json.dumps(name[:NAME_CHARACTERS_MAX])}: {self.named.no_such_name}")
        read = frozenset[str]() if name is None or self.types_of is None else frozenset(self.types_of(name))
        key = tuple(shapes), read
        if (found := self._values.get(key)) is None:
            self.pause()
            found = self._values[key] = self._values_of(shapes, read)
        else:
            self.schemas.count(found.size, self.root)
        return Parameter(name, required, found.strings, found.others, found.whole, words=found.words, types=found.types)

    def _values_of(self, shapes: Sequence[Shape], read: AbstractSet[str]) -> _Written:
        """Write the values of some shapes, which are read by these types."""
        words = tuple(word for word in JSON_WORDS if any(_has_word(shape, word) for shape in shapes))
        if self.allowed is None:
            return _Written(None, None, self.schemas.text_of(shapes, self.root), words, frozenset())
        others = [each for each in map(_without_strings, shapes) if each is not None]
        types = frozenset(kind for shape in others for kind in _types(shape))
        missing = read - {"string"} - types
        firsts = *map(_first, others), *map(FIRST.__getitem__, missing & FIRST.keys())
        begins = "" if self.types_of is None else "".join(sorted({sign for first in firsts for sign in first}))
        strings = self._strings(shapes, begins, self.allowed)
        whole = self.schemas.text_of(shapes, self.root)
        rest = whole if others == shapes else self.schemas.text_of(others, self.root) if others else None
        found = _Written(strings, rest, whole, words, types)
        self.schemas.count(sum(map(len, found.patterns)), self.root)
        return found

    @staticmethod
    def _strings(shapes: Sequence[Shape], first: str, allowed: CharacterSet) -> tuple[str, ...] | Literal["any"] | None:
        """Return the strings of some shapes without those read as JSON of others, by its first characters."""
        begins = complement(union(characters(first), SPACES)) if first else complement(())
        found = list[Expression]()
        for shape in shapes:
            match shape:
                case AnyValue() | String(None) if not first:
                    return "any"
                case AnyValue() | String(None):
                    head = Chars(intersection(allowed, begins))
                    found.append(Alternation((EMPTY, Parts((head, Repeat(Chars(allowed), 0, None))))))
                case String(expression):
                    assert expression is not None
                    kept = _restricted(expression, allowed)
                    found.append(beginning_with(kept, begins) if first else kept)
                case Values(texts):
                    named = (value for value in map(json.loads, texts) if isinstance(value, str))
                    named = (value for value in named if not _is_read_as_json(value, first))
                    found += [Parts(tuple(Chars(characters(sign)) for sign in value)) for value in named]
                case _:
                    pass
        return tuple(dict.fromkeys(in_text(each) for each in found if each != NOTHING)) or None


def _has_word(shape: Shape, word: str) -> bool:
    """Return whether `true`, `false` or `null` is a value of a shape."""
    match shape:
        case AnyValue():
            return True
        case Constant(kind):
            return (kind == "null") is (word == "null")
        case Values(texts):
            return word in texts
        case _:
            return False


def _without_strings(shape: Shape) -> Shape | None:
    if isinstance(shape, String):
        return None
    if isinstance(shape, Values):
        kept = tuple(text for text in shape.texts if not text.startswith('"'))
        return evolve(shape, texts=kept) if kept else None
    return shape


def _is_read_as_json(text: str, first: str) -> bool:
    """Return whether the parser reads a string as JSON that begins with one of the characters `first`."""
    bare = text.strip()
    if not bare or bare[0] not in first:
        return False
    try:
        json.loads(bare)
    except ValueError:
        return bare in {"True", "False", "None"}
    return True


def _first(shape: Shape) -> str:
    """Return the characters with which JSON begins of kinds that a shape allows in part alone."""
    match shape:
        case AnyValue() | Constant() | Number(_, None, None):
            return ""
        case Number():
            return NUMBERS
        case Values(texts):
            kinds = (NUMBERS, WORDS)
            return "".join(next((kind for kind in kinds if text[0] in kind), text[0]) for text in texts)
        case Object() | Map():
            return "{"
        case _:
            return "["


def _types(shape: Shape) -> AbstractSet[str]:
    """Return the types of values of a shape other than strings."""
    match shape:
        case AnyValue():
            return FIRST.keys()
        case Constant(kind) | Number(kind, _, _):
            return {kind, "integer"} if kind == "number" else {kind}
        case Values(texts):
            return {kind for kind, first in FIRST.items() if any(text[0] in first for text in texts)}
        case Object() | Map():
            return {"object"}
        case _:
            return {"array"}


def _restricted(tree: Expression, allowed: CharacterSet, *, strictly: bool = False) -> Expression:
    """Return an expression without some characters where it matches others instead; `strictly`, without them."""
    match tree:
        case Chars(ranges):
            kept = intersection(ranges, allowed)
            return Chars(kept if strictly else kept or ranges)
        case Parts(parts):
            return Parts(tuple(_restricted(part, allowed, strictly=strictly) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(_restricted(part, allowed, strictly=strictly) for part in parts))
        case Repeat(part):
            return evolve(tree, part=_restricted(part, allowed, strictly=strictly))
        case _:
            return tree
