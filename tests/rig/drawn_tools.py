"""Strict tools whose schemas `hypothesis-jsonschema` draws from a schema of schemas; the same ones each time."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import hypothesis_jsonschema._from_schema as drawing
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import utils
from hypothesis_jsonschema import from_schema

from protocol.messages.tools import Tool

Schema: TypeAlias = dict[str, Any]

NAMES = ("city", "days", "near by", "unit", "q", "größe")
PATTERNS = ("^[a-z]+$", "^[A-Z]{2}[0-9]{1,3}$", "^(yes|no)$", "^<?[a-z]>?$", "^\\d{4}-\\d{2}$", "é|ö")
FORMATS = ("date", "uuid", "ipv4", "email")
LISTED = ("a", "b b", "</b>", '"', "日本", 0, 7, -1.5, True, None)


class Many:
    """The collections of Hypothesis 6.170 as version 0.23.1 of hypothesis-jsonschema, the newest, asks for them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._many = utils.many(*arguments, **named).__enter__()
        self._elements = iter(self._many)

    def more(self) -> bool:
        """Return whether another element is wanted."""
        for _ in self._elements:
            return True
        self._many.__exit__(None)
        return False

    def reject(self) -> None:
        """Take the last element back."""
        self._many.reject()


def exactly(required: Schema, /, **optional: Schema) -> Schema:
    """Return the schema of objects with these keys."""
    properties = {**required, **optional}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def of_type(name: str, /, **optional: Schema) -> Schema:
    return exactly({"type": {"const": name}}, **optional)


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


PLAIN = (
    of_type("string"),
    of_type("string", minLength=whole(0, 3), maxLength=whole(3, 9)),
    exactly({"type": {"const": "string"}, "pattern": {"enum": list(PATTERNS)}}),
    exactly({"type": {"const": "string"}, "format": {"enum": list(FORMATS)}}),
    of_type("integer", minimum=whole(-9, 3), maximum=whole(3, 99)),
    of_type("number", minimum=whole(-9, 3), exclusiveMaximum=whole(4, 99)),
    of_type("boolean"),
    exactly({"enum": {"type": "array", "items": {"enum": list(LISTED)}, "minItems": 1, "maxItems": 4}}),
    exactly({"type": {"enum": [["string", "null"], ["integer", "string"], ["boolean", "number", "null"]]}}),
)
"""The schemas of schemas without others in them."""


def schemas(levels: int) -> st.SearchStrategy[Schema]:
    """Return the strategy of schemas with so many levels of values in values."""
    plain: st.SearchStrategy[Schema] = st.one_of([cast("Any", from_schema(each)) for each in PLAIN])
    if not levels:
        return plain
    inner = schemas(levels - 1)
    counts = from_schema(exactly({}, minItems=whole(0, 2), maxItems=whole(2, 4)))
    arrays = st.builds(lambda items, counted: {"type": "array", "items": items, **counted}, inner, counts)
    either = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(plain, plain, arrays, either, objects(inner))


def objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Return the strategy of schemas of objects whose values have schemas of these."""
    named = from_schema({"type": "array", "items": {"enum": list(NAMES)}, "uniqueItems": True, "maxItems": 3})
    properties = st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=4)
    closed = from_schema(exactly({}, additionalProperties={"const": False}))
    return st.builds(_object, properties, named, closed)


def _object(properties: Schema, names: list[str], closed: Schema) -> Schema:
    required = [name for name in names if name in properties]
    return {"type": "object", "properties": properties, "required": required, **closed}


def drawn_tools(count: int, levels: int = 1) -> list[Tool]:
    """Return so many different tools, most of which an engine can be held to."""
    found: dict[str, None] = {}

    @settings(
        max_examples=4 * count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(objects(schemas(levels)))
    def note(schema: Schema) -> None:
        found.setdefault(json.dumps(schema, ensure_ascii=False))

    vars(drawing)["cu"] = SimpleNamespace(**vars(utils) | {"many": Many})
    note()
    # Early examples are the simplest ones.
    step = max(1, len(found) // count)
    texts = list(found)[::step][:count]
    return [Tool(f"tool_{number}", parameters=text, strict=True) for number, text in enumerate(texts)]
