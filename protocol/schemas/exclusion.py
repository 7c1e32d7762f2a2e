"""Whether no value of a shape validates under other schemas: what the branches of a `oneOf` need."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from attrs import define, evolve

from protocol.schemas.alternatives import Alternatives, Conjunction
from protocol.schemas.constraints import allowed_types, listed_values
from protocol.schemas.documents import SchemaNode
from protocol.schemas.lengths import lengths
from protocol.schemas.objects import schemas_for
from protocol.schemas.shapes import Array, Constant, Map, Number, Object, Shape, String, Values
from protocol.schemas.strings import counts
from protocol.schemas.values import Evaluator, is_of

DEPTH_MAX = 8  # properties of properties that are compared


@define
class Exclusion:
    """Compares shapes with schemas; what it cannot tell counts as possible."""

    alternatives: Alternatives
    evaluator: Evaluator
    shapes_of: Callable[[Conjunction], list[Shape] | None]
    """The shapes of a conjunction, None if they are being computed."""

    def apart(self, shape: Shape, other: Conjunction) -> Shape | None:
        """Return a shape, narrowed if need be, without values that validate under other schemas; None if none is."""
        if isinstance(shape, Values):
            kept = tuple(text for text in shape.texts if not self.evaluator.validates(json.loads(text), other))
            return Values(kept) if kept else None
        if self.excludes(shape, other):
            return shape
        if isinstance(shape, Object):
            for name, _ in shape.properties:
                if name not in shape.required:
                    narrowed = evolve(shape, required=shape.required | {name})
                    if self.excludes(narrowed, other):
                        return narrowed
        return None

    def excludes(self, shape: Shape, other: Conjunction, depth: int = 0) -> bool:
        """Return whether it is certain that no value of a shape validates under other schemas."""
        if isinstance(shape, Values):
            return not any(self.evaluator.validates(json.loads(text), other) for text in shape.texts)
        return all(self._excludes(shape, one.nodes, depth + 1) for one in self.alternatives.of(other))

    def _excludes(self, shape: Shape, nodes: Sequence[SchemaNode], depth: int) -> bool:
        if depth > DEPTH_MAX or not nodes:
            return False
        self.alternatives.count(nodes[0])
        types, listed = allowed_types(nodes), listed_values(nodes)
        if types is not None and not _may_be(shape, types):
            return True
        if listed is not None and not any(_may_equal(shape, value) for value in listed):
            return True
        return self._bounds_exclude(shape, nodes, depth)

    def _bounds_exclude(self, shape: Shape, nodes: Sequence[SchemaNode], depth: int) -> bool:
        match shape:
            case Number():
                return any(map(_excluded_by(shape), nodes))
            case String(expression) if expression is not None:
                return _apart(*lengths(expression), *counts(nodes, "Length"))
            case Array():
                return self._array_excludes(shape, nodes, depth)
            case Object():
                return self._object_excludes(shape, nodes, depth)
            case _:
                return False

    def _all_excluded(self, own: Conjunction, other: Conjunction, depth: int) -> bool:
        if not other or (shapes := self.shapes_of(own)) is None:
            return False
        return all(self.excludes(shape, other, depth) for shape in shapes)

    def _array_excludes(self, shape: Array, nodes: Sequence[SchemaNode], depth: int) -> bool:
        longest = len(shape.prefix) if shape.items is None else shape.most
        if _apart(shape.least, longest, *counts(nodes, "Items")):
            return True
        for index in range(min(shape.least, DEPTH_MAX)):
            own = shape.prefix[index] if index < len(shape.prefix) else shape.items or ()
            if self._all_excluded(own, _item(nodes, index), depth):
                return True
        return False

    def _object_excludes(self, shape: Object, nodes: Sequence[SchemaNode], depth: int) -> bool:
        properties = dict(shape.properties)
        required = {name for node in nodes for name in _texts(node.get("required"))}
        if not required <= properties.keys():
            return True
        if _apart(max(shape.least, len(shape.required)), len(properties), *counts(nodes, "Properties")):
            return True
        always = [name for name in properties if name in shape.required]
        return any(self._all_excluded(properties[name], schemas_for(nodes, name), depth) for name in always)


def _item(nodes: Sequence[SchemaNode], index: int) -> Conjunction:
    found: list[SchemaNode] = []
    for node in nodes:
        prefix = node.children("prefixItems")
        if index < len(prefix):
            found.append(prefix[index])
        elif node.get("items") is not None:
            found.append(node.child("items"))
    return tuple(dict.fromkeys(found))


def _texts(value: object) -> list[str]:
    return value if isinstance(value, list) else []


def _may_be(shape: Shape, types: frozenset[str]) -> bool:
    """Return whether a shape has values of some types; a whole number is always an integer, too."""
    match shape:
        case Constant(name):
            return name in types
        case Number():
            return bool(types & {"integer", "number"})
        case String():
            return "string" in types
        case Array():
            return "array" in types
        case Object() | Map():
            return "object" in types
        case _:
            return True


def _may_equal(shape: Shape, value: object) -> bool:
    """Return whether a value may be one of a shape's."""
    equal = True
    match shape:
        case Constant(name):
            equal = is_of(value, [name])
        case Number(name, low, high):
            equal = is_of(value, [name]) and _within(value, low, high)
        case String(expression):
            shortest, longest = lengths(expression) if expression is not None else (0, None)
            equal = isinstance(value, str) and _within(len(value), shortest, longest)
        case Array():
            equal = isinstance(value, list)
        case Object(properties, required):
            equal = isinstance(value, dict) and required <= value.keys() <= dict(properties).keys()
        case Map():
            equal = isinstance(value, dict)
        case _:
            pass
    return equal


def _within(value: object, low: float | None, high: float | None) -> bool:
    return isinstance(value, (int, float)) and (low is None or value >= low) and (high is None or value <= high)


def _excluded_by(shape: Number) -> Callable[[SchemaNode], bool]:
    """Return whether a schema's bounds exclude every number of a shape."""

    def excludes(node: SchemaNode) -> bool:
        low, above = node.get("minimum"), node.get("exclusiveMinimum")
        high, below = node.get("maximum"), node.get("exclusiveMaximum")
        return (
            (isinstance(low, (int, float)) and shape.high is not None and shape.high < low)
            or (isinstance(above, (int, float)) and shape.high is not None and shape.high <= above)
            or (isinstance(high, (int, float)) and shape.low is not None and shape.low > high)
            or (isinstance(below, (int, float)) and shape.low is not None and shape.low >= below)
        )

    return excludes


def _apart(least: int, most: int | None, other_least: int, other_most: int | None) -> bool:
    return (most is not None and most < other_least) or (other_most is not None and other_most < least)
