"""The raw values from which a type is read, and the words for them in a sentence about a wrong value.

A JSON or TOML reader returns values of a few built-in types. This file maps the type of a field to the built-in types
that it is read from. The members of a union must differ in them, since no value is tried against two members.
"""

from __future__ import annotations

import types
from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Protocol, Self, TypeGuard, Union, get_args, get_origin

import attrs

from protocol.strict.mistakes import describe

WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


class ReadsItself(Protocol):
    """A class with a reader of its own, since no list of fields describes its values."""

    value_types: ClassVar[tuple[type, ...]]  # the types of its raw values from a JSON or TOML reader

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return a value of one of the `value_types` as this class; raises `Mistakes`."""


def reads_itself(kind: object) -> TypeGuard[type[ReadsItself]]:
    """Return whether a kind is a class that reads its values itself."""
    return isinstance(kind, type) and hasattr(kind, "from_value")


def allowed_values(kind: object) -> tuple[object, ...]:
    """Return the values of an enumeration or a `Literal`; none for any other kind."""
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(str(member) for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def expected(kind: object) -> str:
    """Return the words for the raw values of a kind."""
    if allowed := allowed_values(kind):
        return either([describe(value) for value in allowed])
    if get_origin(kind) is Annotated:
        return expected(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        words = [expected(member) for member in get_args(kind) if member is not types.NoneType]
        return either(list(dict.fromkeys(words)))  # several members may be objects
    if reads_itself(kind):
        return either([WORDS[member] for member in kind.value_types])
    return WORDS[reader_types(kind)[0]]


def either(words: list[str]) -> str:
    """Return a list of alternatives: "a", "a or b", "a, b or c"."""
    return " or ".join(([", ".join(words[:-1])] if words[1:] else []) + words[-1:])


def reader_types(kind: object) -> tuple[type, ...]:
    """Return the types of the raw values of a kind, as a JSON or TOML reader returns them.

    Raises `TypeError` for a kind without a reader.
    """
    if allowed := allowed_values(kind):
        return tuple({type(value): None for value in allowed})
    if reads_itself(kind):
        return kind.value_types
    origin = get_origin(kind)
    if origin is Annotated:
        return reader_types(get_args(kind)[0])
    if origin in (list, tuple):
        return (list,)
    if origin is dict or (isinstance(kind, type) and attrs.has(kind)):
        return (dict,)
    if isinstance(kind, type) and kind in (bool, int, float, str, types.NoneType):
        return (float, int) if kind is float else (kind,)
    raise TypeError(f"{kind} cannot be told apart in a union")
