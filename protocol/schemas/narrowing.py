"""The shapes of one alternative: its schemas together, narrowed to what the grammar backend keeps.

Beside numbers and strings, three things are narrowed: a schema without a type allows the types of its keywords; an
object with named properties has no others; the names of a map match one pattern.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import define

from protocol.schemas.alternatives import Alternatives, Conjunction
from protocol.schemas.constraints import allowed_types, listed_values
from protocol.schemas.documents import SchemaNode
from protocol.schemas.keywords import KEYWORDS_OF_TYPE
from protocol.schemas.numbers import narrowed_numbers, only_number
from protocol.schemas.objects import narrowed_object
from protocol.schemas.shapes import AnyValue, Array, Constant, Shape, Values
from protocol.schemas.strings import counts, narrowed_string
from protocol.schemas.values import Evaluator, is_written_exactly

_CONSTRAINTS = (
    *(keyword for keywords in KEYWORDS_OF_TYPE.values() for keyword in keywords),
    *("type", "enum", "const"),
)


@define
class Narrowing:
    """Narrows the nodes of alternatives to shapes."""

    alternatives: Alternatives
    evaluator: Evaluator

    def shapes(self, nodes: Sequence[SchemaNode]) -> list[Shape]:
        """Return the shapes of the nodes of an alternative, none if no value is sure to validate."""
        if (listed := listed_values(nodes)) is not None:
            return self._listed(nodes, listed)
        types = allowed_types(nodes)
        if types is None:
            types = frozenset(name for name, keywords in KEYWORDS_OF_TYPE.items() if _any_has(nodes, keywords))
            if not types:
                return [AnyValue()]
        shapes = (self._of_type(name, nodes) for name in _order_of_types(nodes, types))
        return [shape for shape in shapes if shape is not None]

    def _of_type(self, name: str, nodes: Sequence[SchemaNode]) -> Shape | None:
        match name:
            case "integer" | "number":
                return narrowed_numbers(nodes, integer=name == "integer")
            case "string":
                return narrowed_string(nodes)
            case "array":
                return _narrowed_array(nodes)
            case "object":
                return narrowed_object(nodes, self.alternatives, self.evaluator)
            case _:
                return Constant(name)

    def _listed(self, nodes: Sequence[SchemaNode], listed: list[object]) -> list[Shape]:
        """Return the values of an enumeration that validate under the other keywords, too."""
        constraining = tuple(node for node in nodes if _any_has([node], _CONSTRAINTS))
        valid = [value for value in listed if self.evaluator.validates(value, constraining)]
        exact = [value for value in valid if is_written_exactly(value)]
        ranges = [shape for value in valid if value not in exact and (shape := only_number(value)) is not None]
        if valid and not exact and not ranges:
            reason = "numbers beyond 2^53, or of more than 6 decimals, are not written exactly; list others, or strings"
            constraining[0].refuse("enum", reason)
        values = tuple(dict.fromkeys(map(json.dumps, exact)))
        return [*([Values(values)] if values else []), *dict.fromkeys(ranges)]


def _narrowed_array(nodes: Sequence[SchemaNode]) -> Array | None:
    prefixes = [node.children("prefixItems") for node in nodes]
    rests = [node.child("items") if node.get("items") is not None else None for node in nodes]
    least, most = counts(nodes, "Items")
    if most is not None and most < least:
        return None
    for node in nodes:
        if node.get("uniqueItems") is True and (most is None or most > 1):
            node.refuse("uniqueItems", "no engine can be held to it; leave it out, and drop what an answer repeats")
    columns = [_column(prefixes, rests, index) for index in range(max(map(len, prefixes)))]
    items: Conjunction = tuple(rest for rest in rests if rest is not None)
    return Array(tuple(columns), items, least, most)


def _column(prefixes: list[list[SchemaNode]], rests: list[SchemaNode | None], index: int) -> Conjunction:
    """Return the schemas of the item at an index of the beginning of an array."""
    pairs = zip(prefixes, rests, strict=True)
    schemas = (prefix[index] if index < len(prefix) else rest for prefix, rest in pairs)
    return tuple(dict.fromkeys(schema for schema in schemas if schema is not None))


def _any_has(nodes: Sequence[SchemaNode], keywords: Sequence[str]) -> bool:
    return any(isinstance(node.schema, dict) and keyword in node.schema for node in nodes for keyword in keywords)


def _order_of_types(nodes: Sequence[SchemaNode], types: frozenset[str]) -> list[str]:
    """Return types in the order of the first node with a list of types."""
    order: list[str] = next((value for node in nodes if isinstance(value := node.get("type"), list)), [])
    return [*dict.fromkeys(name for name in order if name in types), *sorted(types - set(order))]
