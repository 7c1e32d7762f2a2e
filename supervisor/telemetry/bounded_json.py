"""The values of a log line as JSON of bounded length, width and depth, since clients and other nodes choose some."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice

VALUE_CHARACTERS_MAX = 2048  # each text in a record
VALUES_MAX = 64  # each list or table
DEPTH_MAX = 4
INTEGER_MAX = 2**63
NAMES_MAX = 256  # cached names of fields

_encoded = json.JSONEncoder(ensure_ascii=False).encode
quoted = json.encoder.encode_basestring


def bounded_json(value: object) -> str:
    """Return the JSON of a value within the bounds of `bounded`, by a short way for the usual kinds of values."""
    kind = type(value)  # a subclass may be written otherwise
    if kind is str and isinstance(value, str) and len(value) <= VALUE_CHARACTERS_MAX:
        return quoted(value)
    if (kind is int or kind is float) and -INTEGER_MAX < value < INTEGER_MAX:  # type: ignore[operator]
        return repr(value)
    return "null" if value is None else _encoded(bounded(value))


@lru_cache(maxsize=NAMES_MAX)
def name_json(name: object) -> str:
    """Return a name as a key of a JSON object."""
    return _encoded({name: 0})[1 : -len(": 0}")]


def bounded(value: object, depth: int = DEPTH_MAX) -> object:
    """Return a value as plain JSON of bounded length, width and depth, for a log line."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < INTEGER_MAX else "a large number"
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if not depth:
            return "..."
        first = islice(value, VALUES_MAX)
        if isinstance(value, Mapping):
            return {truncated(str(key)): bounded(value[key], depth - 1) for key in first}
        return [bounded(item, depth - 1) for item in first]
    return truncated(value if isinstance(value, str) else str(value))


def truncated(text: str) -> str:
    """Return a text, cut to the limit of a record and with its length if it is longer."""
    if len(text) <= VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:VALUE_CHARACTERS_MAX]}... ({len(text)} characters)"
