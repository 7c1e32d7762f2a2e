"""The keywords of JSON Schema that no engine can be held to, each with the remedy."""

from __future__ import annotations

REFUSED = {
    "not": "no engine can be held to it; list what is allowed",
    "if": "no engine can be held to it; write the cases as the branches of anyOf",
    "contains": "no engine can be held to it; describe every item by items or prefixItems",
    "minContains": "no engine can be held to it; describe every item by items or prefixItems",
    "maxContains": "no engine can be held to it; describe every item by items or prefixItems",
    "uniqueItems": "no engine can be held to it; leave it out, and drop what an answer repeats",
    "unevaluatedProperties": "no engine can be held to it; write additionalProperties",
    "unevaluatedItems": "no engine can be held to it; write items",
    "dependentSchemas": "no engine can be held to it; write the cases as the branches of anyOf",
    "dependentRequired": "no engine can be held to it; write the cases as the branches of anyOf",
    "dependencies": "no engine can be held to it; write the cases as the branches of anyOf",
    "multipleOf": "no engine can be held to it; list the numbers by enum",
    "$dynamicRef": "only $ref to a place in the same schema can be followed",
    "$recursiveRef": "only $ref to a place in the same schema can be followed",
    "nullable": 'it belongs to OpenAPI 3.0 and not to JSON Schema; write "type": ["string", "null"], or anyOf',
}
"""Keywords that are refused wherever a schema has them, and the reason."""

SCHEMA_KEYWORDS = ("additionalProperties", "items", "propertyNames")
"""Keywords whose value is a schema."""

LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is an array of schemas."""

MAP_KEYWORDS = ("$defs", "definitions", "properties", "patternProperties")
"""Keywords whose value is an object of schemas."""
