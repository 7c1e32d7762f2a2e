"""Whether one value validates under schemas: for `enum` and `const` beside other keywords, and for `oneOf`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction

from attrs import Factory, define

from protocol.schemas.alternatives import Conjunction
from protocol.schemas.documents import Document, SchemaNode
from protocol.schemas.expressions import BadExpression
from protocol.schemas.patterns import found_in
from protocol.schemas.strings import patterns

DEPTH_MAX = 400
WORK_MAX = 100_000
_TYPE_NAMES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}


def type_of(value: object) -> str:
    """Return the JSON type of a value; a whole number is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return _TYPE_NAMES[type(value)]


def is_of(value: object, types: Iterable[str]) -> bool:
    """Return whether a value is of one of some types."""
    own = type_of(value)
    return own in types or (own == "integer" and "number" in types)


def same_value(first: object, second: object) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, and true is not 1."""
    return _canonical(first) == _canonical(second)


def _canonical(value: object) -> object:
    match value:
        case bool() | None | str():
            return type_of(value), value
        case int() | float():
            return "number", Fraction(value)
        case list():
            return "array", tuple(map(_canonical, value))
        case dict():
            return "object", frozenset((name, _canonical(entry)) for name, entry in value.items())
        case _:
            raise AssertionError(f"no JSON value: {type(value)}")


def is_written_exactly(value: object) -> bool:
    """Return whether the backend writes the numbers in a value as they are: it has floats, with 17 digits."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, float) and Decimal(f"{entry:.17g}") != Decimal(repr(entry)):
            return False
        if isinstance(entry, int) and abs(entry) > 2**53:
            return False
        waiting += entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ()
    return True


@define
class Evaluator:
    """Judges values under the schemas of a document."""

    document: Document
    work: int = 0
    _listed: dict[str, frozenset[object]] = Factory(dict)  # the values of each `enum`, by the pointer to its schema

    def validates(self, value: object, conjunction: Conjunction, depth: int = 0) -> bool:
        """Return whether a value validates under every schema; raises `Unenforceable` if that takes too long."""
        return all(self._validates(value, node, depth) for node in conjunction)

    def _validates(self, value: object, node: SchemaNode, depth: int) -> bool:
        if isinstance(node.schema, bool):
            return node.schema
        self.work += 1
        if depth > DEPTH_MAX or self.work > WORK_MAX:
            node.refuse("enum", "its values take too many steps to compare with the other keywords; write fewer")
        self.document.check(node)
        return self._in_place(value, node, depth + 1) and self._itself(value, node, depth + 1)

    def _in_place(self, value: object, node: SchemaNode, depth: int) -> bool:
        """Apply `$ref` and the keywords that have schemas of the same value."""

        def valid(schema: SchemaNode) -> bool:
            return self._validates(value, schema, depth)

        if node.get("$ref") is not None and not valid(self.document.target(node)):
            return False
        any_of, one_of = node.children("anyOf"), node.children("oneOf")
        return (
            all(map(valid, node.children("allOf")))
            and (not any_of or any(map(valid, any_of)))
            and (not one_of or sum(map(valid, one_of)) == 1)
            and all(
                valid(schema)
                for keyword in ("dependentSchemas", "dependencies")
                for name, schema in _schemas(node, keyword)
                if isinstance(value, dict) and name in value
            )
        )

    def _itself(self, value: object, node: SchemaNode, depth: int) -> bool:
        return self._is_listed(value, node) and self._within_bounds(value, node, depth)

    def _within_bounds(self, value: object, node: SchemaNode, depth: int) -> bool:
        match value:
            case bool() | None:
                return True
            case int() | float():
                return _number_validates(value, node)
            case str():
                return _string_validates(value, node)
            case list():
                return self._array_validates(value, node, depth)
            case _:
                assert isinstance(value, dict)
                return self._object_validates(value, node, depth)

    def _is_listed(self, value: object, node: SchemaNode) -> bool:
        """Return whether a value is of a type of the schema, and on its list."""
        types, listed = node.get("type"), node.get("enum")
        if types is not None and not is_of(value, types if isinstance(types, list) else [str(types)]):
            return False
        if isinstance(node.schema, dict) and "const" in node.schema and not same_value(value, node.schema["const"]):
            return False
        if not isinstance(listed, list):
            return True
        if (values := self._listed.get(node.pointer)) is None:
            values = self._listed[node.pointer] = frozenset(map(_canonical, listed))
        return _canonical(value) in values

    def _array_validates(self, value: list[object], node: SchemaNode, depth: int) -> bool:
        prefix = node.children("prefixItems")
        rest = node.child("items") if node.get("items") is not None else None
        if not _counted(len(value), node, "Items"):
            return False
        if node.get("uniqueItems") is True and len({json.dumps(entry, sort_keys=True) for entry in value}) < len(value):
            return False
        schemas = [*prefix[: len(value)], *([rest] * max(0, len(value) - len(prefix)))]
        pairs = zip(value, schemas, strict=True)
        return all(schema is None or self._validates(entry, schema, depth) for entry, schema in pairs)

    def _object_validates(self, value: dict[str, object], node: SchemaNode, depth: int) -> bool:
        required = node.get("required")
        if any(name not in value for name in (required if isinstance(required, list) else ())):
            return False
        if not _counted(len(value), node, "Properties"):
            return False
        for keyword in ("dependentRequired", "dependencies"):
            needs = node.get(keyword)
            for name, others in needs.items() if isinstance(needs, dict) else ():
                if name in value and isinstance(others, list) and any(other not in value for other in others):
                    return False
        if node.get("propertyNames") is not None:
            names = node.child("propertyNames")
            if not all(self._validates(name, names, depth) for name in value):
                return False
        return all(
            self._validates(entry, schema, depth)
            for name, entry in value.items()
            for schema in schemas_of_property(node, name)
        )


def schemas_of_property(node: SchemaNode, name: str) -> list[SchemaNode]:
    """Return the schemas that a schema has for a property of an object; raises `Unenforceable`.

    Where dialects of regular expressions disagree on a name, each may be right, so the schemas of both are returned.
    """
    certain, found = False, list[SchemaNode]()
    if isinstance(properties := node.get("properties"), dict) and name in properties:
        found.append(node.child("properties", name))
        certain = True
    for pattern, schema in node.named("patternProperties").items():
        try:
            if found_in(pattern, name, loose=True):
                found.append(schema)
                certain = certain or found_in(pattern, name)
        except BadExpression as error:
            node.refuse("patternProperties", str(error))
    if not certain and node.get("additionalProperties") is not None:
        found.append(node.child("additionalProperties"))
    return found


def _schemas(node: SchemaNode, keyword: str) -> list[tuple[str, SchemaNode]]:
    value = node.get(keyword)
    entries = value.items() if isinstance(value, dict) else ()
    return [(name, node.child(keyword, name)) for name, entry in entries if not isinstance(entry, list)]


def _counted(count: int, node: SchemaNode, things: str) -> bool:
    least, most = node.get(f"min{things}"), node.get(f"max{things}")
    assert isinstance(least, (int, float, type(None)))
    assert isinstance(most, (int, float, type(None)))
    return (least is None or count >= least) and (most is None or count <= most)


def _number_validates(value: float, node: SchemaNode) -> bool:
    compared: dict[str, Callable[[float], bool]] = {
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
        "multipleOf": lambda size: Fraction(value) % Fraction(size) == 0,
    }
    bounds = ((holds, node.get(keyword)) for keyword, holds in compared.items())
    return all(holds(bound) for holds, bound in bounds if isinstance(bound, (int, float)))


def _string_validates(value: str, node: SchemaNode) -> bool:
    for keyword, pattern in patterns(node):
        searched = pattern if keyword == "pattern" else f"^(?:{pattern})$"
        try:
            if not found_in(searched, value):
                return False
        except BadExpression as error:
            node.refuse(keyword, str(error))
    return _counted(len(value), node, "Length")
