"""The schema that an engine gets: shapes in the few keywords that the grammar backend keeps (xgrammar 0.2.7).

No schema in it has two keywords of which the backend would ignore one, and every object and array has its shape. A
pattern in it is over the text between the quotation marks of a JSON string, as the backend reads patterns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import define, field, frozen

from protocol.schemas.alternatives import Conjunction
from protocol.schemas.documents import SchemaNode
from protocol.schemas.expression_text import in_json
from protocol.schemas.graph import Graph, children, culprit
from protocol.schemas.shapes import AnyValue, Array, Constant, Map, Number, Object, Shape, String, Values

BYTES_MAX = 1024 * 1024
BYTES_PER_SHAPE = 20
NESTED_MAX = 16  # schemas inside of each other before the next becomes a definition


@frozen
class _Definition:
    """A schema with references to others."""

    schema: dict[str, object]
    references: Sequence[Conjunction]
    size: int  # in bytes


@define(eq=False)
class EngineSchema:
    """Writes the shapes of a graph as one schema, or as several that are bounded together."""

    graph: Graph
    _counted: bool = False  # which shapes several places have
    _names: dict[Conjunction, str] = field(factory=dict)
    _definitions: dict[Conjunction, _Definition] = field(factory=dict)
    _references: list[Conjunction] = field(factory=list)  # of what is being written
    _bytes: int = 0

    def text(self, root: SchemaNode) -> str:
        """Return the schema as JSON; raises `Unenforceable` if it becomes too large."""
        return self.text_of(self.graph.shapes[(root,)], root)

    def text_of(self, shapes: Sequence[Shape], root: SchemaNode) -> str:
        """Return the schema of some shapes of the graph of a root as JSON, with the definitions that it reaches.

        Raises `Unenforceable` if all schemas so far have become too large.
        """
        self._name_shared(root)
        own = self._written(shapes, root)
        schema, waiting, definitions = own.schema, [*own.references], dict[str, object]()
        while waiting:
            child = waiting.pop()
            if (name := self._names[child]) in definitions:
                continue
            if (definition := self._definitions.get(child)) is None:
                definition = self._definitions[child] = self._written(self.graph.shapes[child], root)
            else:
                self.count(definition.size, root)
            definitions[name] = definition.schema
            waiting += definition.references
        if definitions:
            schema["$defs"] = definitions
        return json.dumps(schema, separators=(",", ":"))

    def _written(self, shapes: Sequence[Shape], root: SchemaNode) -> _Definition:
        self._references, before = [], self._bytes
        schema = self._choice(shapes, root, NESTED_MAX)
        return _Definition(schema, self._references, self._bytes - before)

    def _name_shared(self, root: SchemaNode) -> None:
        """Name the long schemas that several places have."""
        if self._counted:
            return
        self._counted = True
        arrivals: dict[Conjunction, int] = {(root,): 1}
        for own in self.graph.shapes.values():
            for child in (child for shape in own for child in children(shape)):
                arrivals[child] = arrivals.get(child, 0) + 1
        for child, count in arrivals.items():
            if count > 1 and any(map(_is_long, self.graph.shapes[child])):
                self._names[child] = f"d{len(self._names)}"

    def _choice(self, shapes: Sequence[Shape], root: SchemaNode, depth: int) -> dict[str, object]:
        written = {json.dumps(one): one for one in (self._shape(shape, root, depth) for shape in shapes)}
        schemas = list(written.values())
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _child(self, conjunction: Conjunction, root: SchemaNode, depth: int) -> dict[str, object]:
        if conjunction not in self._names and depth == 0:
            self._names[conjunction] = f"d{len(self._names)}"
        if (name := self._names.get(conjunction)) is not None:
            self._references.append(conjunction)
            return {"$ref": f"#/$defs/{name}"}
        return self._choice(self.graph.shapes[conjunction], root, depth - 1)

    def _shape(self, shape: Shape, root: SchemaNode, depth: int) -> dict[str, object]:
        written: dict[str, object]
        self.count(BYTES_PER_SHAPE, root)
        match shape:
            case AnyValue():
                written = {}
            case Values(texts):
                self.count(sum(map(len, texts)), root)
                written = {"enum": [json.loads(text) for text in texts]}
            case Constant(name):
                written = {"type": name}
            case Number(name, low, high):
                written = {"type": name, **_bounds(minimum=low, maximum=high)}
            case String(expression):
                pattern = {} if expression is None else {"pattern": in_json(expression)}
                self.count(sum(map(len, pattern.values())), root)
                written = {"type": "string", **pattern}
            case Array():
                written = self._array(shape, root, depth)
            case Map():
                written = self._map(shape, root, depth)
            case Object(properties, required, least, most):
                self.count(sum(len(name) + BYTES_PER_SHAPE for name, _ in properties), root)
                written = {
                    "type": "object",
                    "properties": {name: self._child(child, root, depth) for name, child in properties},
                    "required": [name for name, _ in properties if name in required],
                    "additionalProperties": False,
                    **_counts(len(properties), len(required), least, most),
                }
        return written

    def count(self, size: int, root: SchemaNode) -> None:
        """Count what is written; raises `Unenforceable` if it becomes too large."""
        self._bytes += size
        if self._bytes > BYTES_MAX:
            reason = (
                f"the schema for the engine takes more than {BYTES_MAX:,} bytes; write fewer branches or references"
            )
            root.refuse(culprit(root), reason)

    def _array(self, shape: Array, root: SchemaNode, depth: int) -> dict[str, object]:
        begin = {"prefixItems": [self._child(child, root, depth) for child in shape.prefix]} if shape.prefix else {}
        rest = False if shape.items is None else self._child(shape.items, root, depth)
        most = None if shape.items is None else shape.most
        return {"type": "array", **begin, "items": rest, **_bounds(minItems=shape.least or None, maxItems=most)}

    def _map(self, shape: Map, root: SchemaNode, depth: int) -> dict[str, object]:
        values = self._child(shape.values, root, depth)
        either: dict[str, object] = {"additionalProperties": values}
        if shape.names is not None:
            either = {"patternProperties": {in_json(shape.names): values}, "additionalProperties": False}
        return {"type": "object", **either, **_bounds(minProperties=shape.least or None, maxProperties=shape.most)}


def _is_long(shape: Shape) -> bool:
    """Return whether a shape is worth a definition where several places have it."""
    long_values = isinstance(shape, Values) and len(shape.texts) > BYTES_PER_SHAPE
    return (
        long_values
        or (isinstance(shape, String) and shape.expression is not None)
        or any(True for _ in children(shape))
    )


def _bounds(**bounds: float | None) -> dict[str, object]:
    return {keyword: bound for keyword, bound in bounds.items() if bound is not None}


def _counts(declared: int, required: int, least: int, most: int | None) -> dict[str, object]:
    """Return the bounds of a number of properties, where they say more than the properties themselves."""
    return _bounds(
        minProperties=least if least > required else None,
        maxProperties=most if most is not None and most < declared else None,
    )
