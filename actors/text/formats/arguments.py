"""Arguments of calls that a model writes as plain text, with the types of the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Final, NoReturn, cast

from attrs import Factory, frozen

from actors.text.formats.json_text import LEVELS_MAX
from actors.text.formats.tool_table import ANY, Schema, ToolTable

PLACES_MAX = 1_000  # schemas in which an argument is looked for; one that is not found there has any type
STRING: Final = frozenset({"string"})
# Some templates write these values as Python does.
PYTHON_WORDS: Mapping[str, object] = {"True": True, "False": False, "None": None}
NAMES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def decoded(text: str) -> object:
    """Return the value of a JSON text; raises `ValueError`, also for one that JSON cannot give back."""
    try:
        value: object = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("too deep") from None
    level = [value]
    for _ in range(LEVELS_MAX + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]
        if not level:
            return value
    raise ValueError("too deep")


def encoded(value: object) -> str:
    """Return the JSON text of a value."""
    text = json.dumps(value, ensure_ascii=False)
    # Half a surrogate pair is a character of JSON, and none of UTF-8.
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def types_of(tools: ToolTable, tool: str, name: str) -> frozenset[str]:
    """Return the JSON types of an argument by the schema of its tool; empty for any."""
    root = tools.schemas.get(tool, ANY)
    return types_of_schema(member_of(root, root, name), root)


def types_of_schema(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the JSON types of a schema within that of a tool; empty for any."""
    return frozenset(_types(schema, root, {}, LEVELS_MAX))


def member_of(schema: Schema, root: Schema, name: str) -> Schema:
    """Return the schema of a member of an object, or of the items of a list; that of any value if there is none.

    It allows all values that the member may have, so a member of several alternatives has those of each.
    """
    return _Member(root, name).of(schema, LEVELS_MAX) or ANY


def is_json(types: frozenset[str]) -> bool:
    """Return whether a value of these types can only be JSON, and no plain text."""
    return bool(types) and "string" not in types


def value_of(text: str, types: frozenset[str]) -> object:
    """Return the value of an argument: a string as it stands, other types by JSON; text that is none is a string."""
    if types == STRING:
        return text
    bare = text.strip()
    try:
        value = PYTHON_WORDS[bare] if types and bare in PYTHON_WORDS else decoded(bare)
    except ValueError:
        return text
    if not types:
        return value
    kind = NAMES[type(value)]
    if kind == "number" and "number" not in types and "integer" in types and cast("float", value).is_integer():
        return int(cast("float", value))
    fits = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return value if fits or "string" not in types else text


@frozen
class _Member:
    """A member of objects, which is looked for in schemas within a root."""

    root: Schema
    name: str
    _found: dict[str, Schema | None] = Factory(dict)  # by references, each of which is followed once
    _open: set[str] = Factory(set)  # the references that are being followed
    _places: Iterator[int] = Factory(count)

    def of(self, place: object, levels: int) -> Schema | None:
        """Return its schema; None if this schema names no such member."""
        if not isinstance(place, dict) or not levels:
            return None
        # It is looked for while an answer is read, once for each argument.
        if next(self._places) >= PLACES_MAX:
            return ANY
        properties = place.get("properties")
        own = properties.get(self.name) if isinstance(properties, dict) else None
        own = place.get("items") if own is None else own
        if own is not None:
            return own if isinstance(own, dict) else ANY
        parts = (self._of_reference(place.get("$ref"), levels), *self._of_each(_first(place.get("allOf")), levels))
        if (found := next((part for part in parts if part is not None), None)) is not None:
            return found
        options = (self._of_any(_first(place.get(key)), levels) for key in ("anyOf", "oneOf"))
        return next((option for option in options if option is not None), None)

    def _of_reference(self, reference: object, levels: int) -> Schema | None:
        if not isinstance(reference, str):
            return None
        if reference not in self._found:
            self._found[reference] = None
            self._open.add(reference)
            self._found[reference] = self.of(_referred(reference, self.root), levels - 1)
            self._open.remove(reference)
        return self._found[reference]

    def _of_each(self, places: list[object], levels: int) -> list[Schema | None]:
        return [self.of(place, levels - 1) for place in places]

    def _of_any(self, options: list[object], levels: int) -> Schema | None:
        """Return the schema of a member of alternatives, which is that of any value if one of them names none."""
        members = self._of_each(options, levels)
        if not (found := [member for member in members if member is not None]):
            return None
        others = (option for option, member in zip(options, members, strict=True) if member is None)
        if not all(found) or any(self._names_none(option) for option in others):
            return ANY
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _names_none(self, schema: object) -> bool:
        """Return whether a schema allows objects and names none of their members, so that any may be there."""
        if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
            # An alternative that is the schema around it adds nothing.
            if reference in self._open:
                return False
            schema = _referred(reference, self.root)
        if not isinstance(schema, dict):
            return schema is True
        types = types_of_schema(schema, self.root)
        return "properties" not in schema and (not types or "object" in types)


def _types(schema: object, root: Schema, followed: dict[str, set[str]], levels: int) -> set[str]:
    """Return the types of a schema; empty for any. Each reference is followed once."""
    if not isinstance(schema, dict) or not levels:
        return set()
    types = schema.get("type")
    found = {types} if isinstance(types, str) else {each for each in _listed(types) if isinstance(each, str)}
    if not found and isinstance(reference := schema.get("$ref"), str):
        if reference not in followed:
            followed[reference] = set()
            followed[reference] = _types(_referred(reference, root), root, followed, levels - 1)
        found = set(followed[reference])
    if not found:
        values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
        found = {NAMES[type(value)] for value in values}
    for key in ("anyOf", "oneOf"):
        if not found and (options := _listed(schema.get(key))):
            each = [_types(option, root, followed, levels - 1) for option in options]
            found = set().union(*each) if all(each) else set()
    if not found:
        parts = (_types(part, root, followed, levels - 1) for part in _listed(schema.get("allOf")))
        found = next((part for part in parts if part), set())
    return found | {"null"} if found and schema.get("nullable") is True else found


def _referred(reference: str, root: Schema) -> object:
    """Return the schema that a reference within a schema names; None for none."""
    place: object = root
    if not reference.startswith("#"):
        return None
    for key in reference.split("/")[1:]:
        place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _first(value: object) -> list[object]:
    """Return the items of a list, but for those that are beyond `PLACES_MAX` in any case."""
    return _listed(value)[: PLACES_MAX + 1]


def _inner(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value
