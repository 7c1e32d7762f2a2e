"""The reading of objects: by the fields of its attrs class, its tags, and the keys that are accepted without effect.

Stock clients send fields that this server does not implement, mostly with a value without effect. A class lists such
values in `harmless`, so that these requests are served. Any other value of such a field is refused by name: no option
of a client is ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError
from cattrs.gen import make_dict_structure_fn

from protocol.strict.expected import WORDS, either
from protocol.strict.hooks import Hook, read_mapping
from protocol.strict.mistakes import Mistakes, describe, wrong
from protocol.strict.tagged import tags_of

Harmless = Mapping[str, tuple[object, ...]]
"""Keys that are accepted while their value is null or one of these; a type stands for all values of that type."""


def object_hook(cls: type[attrs.AttrsInstance], converter: Converter) -> Hook:
    """Return the hook of an attrs class."""
    attrs.resolve_types(cls, include_extras=True)
    read = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)
    tags = tags_of(cls)
    harmless: Harmless = getattr(cls, "harmless", {})

    def hook(value: object, _: object) -> object:
        value = read_mapping(value)
        for tag in tags:
            tag.check(value)
        if harmless.keys().isdisjoint(value):
            return read(value, cls)
        errors: list[Exception] = [*_harmful(value, harmless)]
        try:
            result = read({key: item for key, item in value.items() if key not in harmless}, cls)
        except ClassValidationError as error:
            raise ClassValidationError("an object", [*errors, *error.exceptions], cls) from None
        if errors:
            raise ClassValidationError("an object", errors, cls)
        return result

    return hook


def _harmful(fields: Mapping[str, object], harmless: Harmless) -> Iterator[Mistakes]:
    for key, accepted in harmless.items():
        value = fields.get(key)
        if value is None or any(_matches(value, pattern) for pattern in accepted):
            continue
        if accepted and all(isinstance(pattern, type) for pattern in accepted):
            words = either([WORDS[pattern] for pattern in accepted if isinstance(pattern, type)])
            yield wrong(f"expected {words}, got {describe(value)}", key)
        else:
            named = [describe(pattern) for pattern in accepted if isinstance(pattern, str | int)]
            instead = f"only {either(named)} is" if named else "leave it out"
            yield wrong(f"{describe(value)} is not supported here; {instead}", key, unsupported=True)


def _matches(value: object, pattern: object) -> bool:
    """Return whether a value is the accepted one, or of the accepted type; null is as good as a missing key."""
    if isinstance(pattern, type):
        return type(value) is pattern
    # Types are compared first: in Python 0 equals False, and 1 True.
    if type(value) is not type(pattern):
        return False
    if isinstance(value, dict) and isinstance(pattern, dict):
        value = {key: item for key, item in value.items() if item is not None}
        return value.keys() == pattern.keys() and all(_matches(value[key], pattern[key]) for key in pattern)
    if isinstance(value, list) and isinstance(pattern, list):
        return len(value) == len(pattern) and all(map(_matches, value, pattern))
    return value == pattern
