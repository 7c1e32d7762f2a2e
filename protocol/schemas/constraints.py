"""The types and the listed values of several schemas together."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.schemas.documents import SchemaNode


def allowed_types(nodes: Sequence[SchemaNode]) -> frozenset[str] | None:
    """Return the types that every node allows, None if no node has a `type`."""
    allowed: frozenset[str] | None = None
    for node in nodes:
        if (value := node.get("type")) is not None:
            own = frozenset(value if isinstance(value, list) else [str(value)])
            allowed = own if allowed is None else _both(allowed, own)
    return None if allowed is None else allowed - ({"integer"} if "number" in allowed else set())


def _both(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    integers = ("integer" in first and "number" in second) or ("number" in first and "integer" in second)
    return (first & second) | ({"integer"} if integers else set())


def listed_values(nodes: Sequence[SchemaNode]) -> list[object] | None:
    """Return the values that the first `enum` or `const` lists, None if there is none."""
    for node in nodes:
        if isinstance(node.schema, dict) and "const" in node.schema:
            return [node.schema["const"]]
        if isinstance(values := node.get("enum"), list):
            return values
    return None
