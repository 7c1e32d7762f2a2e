"""The reading of objects: by the fields of its attrs class, its tags, and the keys that are accepted without effect.

Stock clients send fields that this server does not implement, mostly with a value without effect. A class lists such
values in `harmless`, so that these requests are served. Any other value of such a field is refused by name: no option
of a client is ignored silently.

A class may check its fields against each other in `checks`. Checks run although other fields are wrong, each as far as
it reads valid fields, so that one error has the mistakes of both sorts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol, TypeAlias, cast

import attrs
from cattrs import Converter
from cattrs.errors import AttributeValidationNote, ClassValidationError
from cattrs.gen import make_dict_structure_fn

from protocol.strict.expected import WORDS, either
from protocol.strict.hooks import Hook, read_mapping
from protocol.strict.mistakes import Mistake, Mistakes, describe, wrong
from protocol.strict.tagged import tags_of

Harmless = Mapping[str, tuple[object, ...]]
"""Keys that are accepted while their value is null or one of these; a type stands for all values of that type."""

FieldCheck: TypeAlias = Callable[[], Iterable[Mistake]]
"""Returns the mistakes between some fields of an object that are each valid."""


class Checking(Protocol):
    """An object that checks its fields against each other."""

    def checks(self) -> Iterable[FieldCheck]:
        """Return the checks, without reading any field."""


def object_hook(cls: type[attrs.AttrsInstance], converter: Converter) -> Hook:
    """Return the hook of an attrs class."""
    attrs.resolve_types(cls, include_extras=True)
    read = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)
    tags = tags_of(cls)
    harmless: Harmless = getattr(cls, "harmless", {})
    checking = hasattr(cls, "checks")

    def hook(value: object, _: object) -> object:
        value = read_mapping(value)
        for tag in tags:
            tag.check(value)
        errors: list[Exception] = []
        if not harmless.keys().isdisjoint(value):
            errors += _harmful(value, harmless)
            value = {key: item for key, item in value.items() if key not in harmless}
        unread: Collection[str] = ()
        try:
            result = read(value, cls)
        except ClassValidationError as error:
            errors += error.exceptions
            if not checking:
                raise ClassValidationError("an object", errors, cls) from None
            unread = {note.name for each in error.exceptions for note in _field_notes(each)}
            result = _without(unread, value, cls, converter)
        if checking and (mistakes := _between_fields(cast("Checking", result), unread)):
            errors.append(Mistakes(tuple(mistakes)))
        if errors:
            raise ClassValidationError("an object", errors, cls)
        return result

    return hook


def _field_notes(error: BaseException) -> Iterator[AttributeValidationNote]:
    """Yield the note that names the field of an error, if it is about one."""
    yield from (note for note in getattr(error, "__notes__", ())[-1:] if isinstance(note, AttributeValidationNote))


def _without(
    unread: Collection[str], value: Mapping[str, object], cls: type[attrs.AttrsInstance], converter: Converter
) -> attrs.AttrsInstance:
    """Return an object with its valid fields alone: reading another one raises `AttributeError`."""
    valid: dict[str, object] = dict.fromkeys(unread)
    for field in attrs.fields(cls):
        if field.name in value and field.name not in unread:
            valid[field.name] = converter.get_structure_hook(field.type)(value[field.name], field.type)
    result = cls(**valid)
    for name in unread:
        object.__delattr__(result, name)
    return result


def _between_fields(result: Checking, unread: Collection[str]) -> list[Mistake]:
    mistakes: list[Mistake] = []
    for check in result.checks():
        try:
            mistakes += check()
        except AttributeError as error:
            if error.obj is not result or error.name not in unread:
                raise  # a bug of ours
    return mistakes


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
