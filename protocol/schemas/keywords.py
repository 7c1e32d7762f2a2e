"""The keywords of JSON schemas: the possible values of each, and the keywords refused in every schema.

Every keyword that is in no table here is an annotation (`title`, `default`, `discriminator`, `x-...`): it says nothing
about which values are valid.
"""

from __future__ import annotations

from collections.abc import Callable

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

DIALECTS = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/schema",
        "https://json-schema.org/draft-07/schema",
    }
)
"""Values of `$schema` whose keywords mean what they mean in 2020-12, or less; without a trailing `#`."""

_CASES = "no engine can be held to it; write the cases as the branches of anyOf"
_ITEMS = "no engine can be held to it; describe every item by items or prefixItems"
_REFERENCE = "only $ref to a place in the same schema can be followed"

REFUSED = {
    "not": "no engine can be held to it; list what is allowed",
    "if": _CASES,
    "contains": _ITEMS,
    "unevaluatedProperties": "no engine can be held to it; write additionalProperties",
    "unevaluatedItems": "no engine can be held to it; write items",
    "$dynamicRef": _REFERENCE,
    "$recursiveRef": _REFERENCE,
    "nullable": 'it belongs to OpenAPI 3.0 and not to JSON Schema; add "null" to the type, or a branch to anyOf',
}
"""Keywords that are refused, unless their value makes no constraint, and the reason."""

HARMLESS: dict[str, Callable[[dict[str, object]], bool]] = {
    "not": lambda schema: schema["not"] is False,
    "if": lambda schema: "then" not in schema and "else" not in schema,
    "unevaluatedProperties": lambda schema: schema["unevaluatedProperties"] in (True, {}),
    "unevaluatedItems": lambda schema: schema["unevaluatedItems"] in (True, {}),
    "nullable": lambda schema: schema["nullable"] is False,
}
"""Whether a keyword of `REFUSED` makes no constraint in a schema."""


def _is_schema(value: object) -> bool:
    return isinstance(value, (bool, dict))


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value) and value == int(value) >= 0  # type: ignore[call-overload]


def _is_type(value: object) -> bool:
    return value in TYPES or (isinstance(value, list) and bool(value) and all(entry in TYPES for entry in value))


def _is_dependencies(value: object) -> bool:
    return isinstance(value, dict) and all(_is_texts(entry) or _is_schema(entry) for entry in value.values())


_SCHEMA = (_is_schema, "must be a schema: an object, true or false")
_SCHEMAS = (_is_schemas, "must be an array of schemas, at least one")
_SCHEMA_MAP = (_is_schema_map, "must be an object of schemas")
_TEXT = (_is_text, "must be a string")
_NUMBER = (_is_number, "must be a number")
_COUNT = (_is_count, "must be a whole number that is not negative")

EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "type": (_is_type, f"must be one or several of {', '.join(TYPES)}"),
    "enum": (lambda value: isinstance(value, list), "must be an array"),
    **dict.fromkeys(("$ref", "$anchor", "$dynamicAnchor", "pattern", "format"), _TEXT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_number, "must be a number (draft 4 had true here)")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "must be a number above 0"),  # type: ignore[operator]
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    "uniqueItems": (lambda value: isinstance(value, bool), "must be true or false"),
    "required": (_is_texts, "must be an array of names"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
        "must be an object of arrays of names",
    ),
    "dependencies": (_is_dependencies, "must be an object of arrays of names or of schemas"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"), _SCHEMA_MAP),
    "items": (_is_schema, "must be a schema; write prefixItems for an array of schemas"),
    **dict.fromkeys(("additionalProperties", "propertyNames"), _SCHEMA),
}
"""Whether a keyword's value is one that it may have, and the sentence if it is not."""

MAP_KEYWORDS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords whose value is an object of schemas."""

KEYWORDS_OF_TYPE = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("prefixItems", "items", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties"),
    ),
}
"""The keywords that constrain values of one type alone."""
