"""Strict structuring of documents (JSON bodies, TOML files) as frozen attrs classes, with all mistakes at once.

Nothing is coerced: a `bool` is no integer, `"8000"` is no number, an unknown key is a mistake. An integer may stand for
a number. `Annotated[X, check]` adds a `Check` (`hooks`). A class may list keys without effect in `harmless` and check
fields against each other in `checks` (`objects`), mark the field of its kind with `tag()` (`tagged`), or read its
values itself by `from_value` (`expected`).

The data are untrusted: lists and objects have a longest length, each list reports a limited number of mistakes, and no
sentence about a value is longer than a line. A bug in a class, such as a union whose members cannot be told apart,
raises `TypeError` when the class is first used, and is never reported as a mistake in the data.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Literal, TypeVar, Union, get_origin

import attrs
from cattrs import Converter
from cattrs.errors import (
    AttributeValidationNote,
    CattrsError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)

from protocol.strict.expected import reads_itself
from protocol.strict.hooks import (
    MISTAKES_MAX,
    Hook,
    checked_hook,
    choice_hook,
    mapping_hook,
    own_hook,
    read_number,
    scalar_hook,
    sequence_hook,
    union_hook,
)
from protocol.strict.mistakes import Mistake, Mistakes, join, segment
from protocol.strict.objects import object_hook

T = TypeVar("T")

HINT_MIN = 0.75  # least similarity of two names: a misleading hint is worse than none


def structure(data: object, cls: type[T], hooks: Mapping[type[object], Hook] | None = None) -> T:
    """Return `data` as a `cls`, or raise `Mistakes` with every mistake in it; `hooks` replace the hooks of classes."""
    try:
        return (_make_converter(hooks) if hooks else _converter).structure(data, cls)
    except (CattrsError, Mistakes) as error:
        raise Mistakes(tuple(_flatten(error, ""))) from None


def _flatten(error: Exception, path: str, *, field: bool = False) -> Iterator[Mistake]:
    match error:
        case Mistakes():
            for mistake in error.mistakes:
                yield attrs.evolve(mistake, path=join(path, mistake.path))
        case ClassValidationError() | IterableValidationError():
            for inner in error.exceptions:
                place = _place(inner)
                yield from _flatten(inner, join(path, place), field=bool(place))
        case ForbiddenExtraKeysError():
            yield from _unknown(error, path)
        case KeyError() if field:
            yield Mistake(path, "is missing")
        case ValueError():
            yield Mistake(path, str(error))
        case _:
            raise error  # a bug of ours, no mistake in the data


def _place(error: Exception) -> str:
    """Return the key or index of an error's value from the note of cattrs; empty if there is no note."""
    for note in reversed(getattr(error, "__notes__", [])):
        if isinstance(note, AttributeValidationNote):
            return segment(note.name)
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]" if isinstance(note.index, int) else segment(note.index)
    return ""


def _unknown(error: ForbiddenExtraKeysError, path: str) -> Iterator[Mistake]:
    names = [field.name for field in attrs.fields(error.cl)]
    names += [key for key in getattr(error.cl, "harmless", {}) if key not in names]
    keys = sorted(error.extra_fields)
    for key in keys[:MISTAKES_MAX]:
        near = _near(key, names) if len(key) <= 64 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Mistake(join(path, segment(key)), f"is not a key here{hint}")
    if unnamed := tuple(keys[MISTAKES_MAX:]):
        yield Mistake(path, f"has {len(unnamed)} more keys that are not known here", unnamed=unnamed)


def _near(key: str, names: list[str]) -> list[str]:
    """Return a name of the same words in another order, or a similar one, if there is one."""
    words = sorted(key.split("_"))
    reordered = [name for name in names if sorted(name.split("_")) == words]
    return reordered or get_close_matches(key, names, n=1, cutoff=HINT_MIN)


def _make_converter(hooks: Mapping[type[object], Hook]) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (bool, int, str, types.NoneType):
        converter.register_structure_hook(scalar, scalar_hook(scalar))
    converter.register_structure_hook(float, read_number)
    # cattrs takes the hook of the nearest class, and every `StrEnum` is a `str`
    converter.register_structure_hook(StrEnum, lambda value, kind: choice_hook(kind)(value, kind))

    def register(origins: tuple[object, ...], factory: Callable[[object, Converter], Hook]) -> None:
        converter.register_structure_hook_factory(
            lambda kind: get_origin(kind) in origins, lambda kind: factory(kind, converter)
        )

    register((list, tuple), sequence_hook)
    register((dict,), mapping_hook)
    register((Union, types.UnionType), union_hook)
    register((Annotated,), checked_hook)
    register((Literal,), lambda kind, _: choice_hook(kind))
    converter.register_structure_hook_factory(attrs.has, lambda cls: object_hook(cls, converter))
    converter.register_structure_hook_factory(reads_itself, own_hook)
    for cls, hook in hooks.items():
        converter.register_structure_hook(cls, hook)
    return converter


_converter = _make_converter({})
