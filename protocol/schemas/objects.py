"""Objects: the properties of several schemas together, as named properties or as a map."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.schemas.alternatives import Alternatives, Conjunction
from protocol.schemas.constraints import allowed_types
from protocol.schemas.documents import SchemaNode
from protocol.schemas.expressions import Alternation, BadExpression, Expression
from protocol.schemas.patterns import string_expression
from protocol.schemas.shapes import Map, Object
from protocol.schemas.strings import counts, narrowed_string
from protocol.schemas.values import Evaluator, schemas_of_property

_REPEATED = "no engine can be held to it, since an answer may repeat a name; list the names in properties"


def narrowed_object(
    nodes: Sequence[SchemaNode], alternatives: Alternatives, evaluator: Evaluator
) -> Object | Map | None:
    """Return the objects that validate under every node, None if there are none; raises `Unenforceable`."""
    least, most = counts(nodes, "Properties")
    required = frozenset(name for node in nodes for name in _names(node.get("required")))
    names = list(dict.fromkeys(name for node in nodes for name in _names(node.get("properties"))))
    names += [name for node in nodes for name in _names(node.get("required")) if name not in names]
    name_schemas = tuple(node.child("propertyNames") for node in nodes if node.get("propertyNames") is not None)
    if not names and name_schemas:
        listed = _listed_names(name_schemas, alternatives)
        names = [] if listed is None else listed
        if listed is not None and not names:
            return Object((), required, least, most)
    if not names and any(_is_closed(node) for node in nodes):
        return Object((), required, least, most)
    if not names:
        if least > 1:
            _refuse_count(nodes)
        return _map(nodes, name_schemas, alternatives, least, most)
    allowed = [name for name in dict.fromkeys(names) if evaluator.validates(name, name_schemas)]
    if not required <= set(allowed):
        return None
    if least > len(allowed):
        _refuse_count(nodes)
    properties = tuple((name, schemas_for(nodes, name)) for name in allowed)
    return Object(properties, required, least, most)


def schemas_for(nodes: Sequence[SchemaNode], name: str) -> Conjunction:
    """Return the schemas that nodes together have for a property."""
    return tuple(dict.fromkeys(schema for node in nodes for schema in schemas_of_property(node, name)))


def _is_closed(node: SchemaNode) -> bool:
    """Return whether a schema lists the properties of an object, none at all, and says nothing about others."""
    return (
        node.get("properties") == {} and not _has(node, "additionalProperties") and not _has(node, "patternProperties")
    )


def _names(value: object) -> list[str]:
    return list(value) if isinstance(value, (list, dict)) else []


def _refuse_count(nodes: Sequence[SchemaNode]) -> None:
    for node in nodes:
        if node.get("minProperties") is not None:
            node.refuse("minProperties", _REPEATED)


def _listed_names(schemas: Conjunction, alternatives: Alternatives) -> list[str] | None:
    """Return the names that `propertyNames` lists by `enum` or `const`, None if it does not list them."""
    listed: list[str] = []
    for alternative in alternatives.of(schemas):
        values = [
            value
            for node in alternative.nodes
            for value in ([node.get("const")] if node.get("const") is not None else _names(node.get("enum")))
        ]
        if not values:
            return None
        listed += [value for value in values if isinstance(value, str)]
    return list(dict.fromkeys(listed))


def _map(
    nodes: Sequence[SchemaNode], name_schemas: Conjunction, alternatives: Alternatives, least: int, most: int | None
) -> Map:
    patterns = list(dict.fromkeys(name for node in nodes for name in node.named("patternProperties")))
    holder = next((node for node in nodes if node.named("patternProperties")), nodes[0])
    if len(patterns) > 1 or (patterns and name_schemas):
        holder.refuse("patternProperties", "names can be held to one pattern; write all of them as one")
    if not patterns:
        values = tuple(node.child("additionalProperties") for node in nodes if _has(node, "additionalProperties"))
        return Map(_expression_of_names(name_schemas, alternatives), values, least, most)
    try:
        names = string_expression(patterns[0])
    except BadExpression as error:
        holder.refuse("patternProperties", str(error))
    schemas = [
        node.named("patternProperties").get(patterns[0])
        or (node.child("additionalProperties") if _has(node, "additionalProperties") else None)
        for node in nodes
    ]
    return Map(names, tuple(schema for schema in schemas if schema is not None), least, most)


def _expression_of_names(schemas: Conjunction, alternatives: Alternatives) -> Expression | None:
    if not schemas:
        return None
    expressions: list[Expression] = []
    for alternative in alternatives.of(schemas):
        if alternative.taken:
            alternative.taken[0][0].holder.refuse("oneOf", "names can be held to anyOf, but not to oneOf; write anyOf")
        if "string" not in (allowed_types(alternative.nodes) or {"string"}):
            continue
        for node in alternative.nodes:
            if node.get("enum") is not None or node.get("const") is not None:
                node.refuse("propertyNames", "names can be listed or held to a pattern, but not both; list them")
        if (text := narrowed_string(alternative.nodes)) is not None:
            if text.expression is None:
                return None
            expressions.append(text.expression)
    if not expressions:
        schemas[0].refuse("propertyNames", "no name validates under it; write additionalProperties: false")
    return expressions[0] if len(expressions) == 1 else Alternation(tuple(expressions))


def _has(node: SchemaNode, keyword: str) -> bool:
    return node.get(keyword) is not None
