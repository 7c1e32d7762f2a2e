"""The reading of each type: one function from a raw value to a typed one, which raises `Mistakes` for a wrong value.

cattrs calls these functions, its *hooks*, with a value and the type that is wanted. The hook of a list or a mapping
reads all items before it raises, so that one error has every mistake, up to `MISTAKES_MAX`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol, TypeVar, get_args, get_origin

from cattrs import Converter
from cattrs.errors import CattrsError, IterableValidationError, IterableValidationNote

from protocol.strict.checks import Holds
from protocol.strict.expected import ReadsItself, allowed_values, expected, reader_types
from protocol.strict.mistakes import Mistakes, describe, wrong
from protocol.strict.tagged import is_tagged, tagged_hook

T = TypeVar("T")
Place = TypeVar("Place", int, str)  # the index or the key of an item

Hook = Callable[[object, object], object]

ITEMS_MAX = 16_384
"""The longest list, and the most keys of an object, that are read: a larger one would delay all other requests."""
MISTAKES_MAX = 16  # reported for one list or object: more do not help to find the cause


class Check(Protocol):
    """A condition on values of the right type, added to the type by `Annotated`."""

    def mistake(self, value: object) -> str | None:
        """Return the mistake in a value of the right type, None if there is none."""


def scalar_hook(kind: type) -> Hook:
    """Return the hook of a built-in type, which accepts its own values alone: a `bool` is no `int`."""

    def hook(value: object, wanted: object) -> object:
        if wanted is not kind:
            raise TypeError(f"{wanted} cannot be read: {kind} can, its subclasses cannot")
        if type(value) is kind:
            return value
        raise wrong(f"expected {expected(kind)}, got {describe(value)}")

    return hook


def read_number(value: object, _: object) -> float:
    """Return a finite number, from an integer too."""
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise wrong("is too large") from None
    if type(value) is not float:
        raise wrong(f"expected a number, got {describe(value)}")
    if not math.isfinite(value):
        raise wrong(f"expected a finite number, got {value}")
    return value


@cache
def choice_hook(kind: object) -> Hook:
    """Return the hook of an enumeration or a `Literal`."""
    make: Callable[[object], object] = kind if isinstance(kind, type) else lambda value: value
    made = {(type(value), value): make(value) for value in allowed_values(kind)}  # True is no 1
    types = frozenset(type_of for type_of, _ in made)

    def hook(value: object, _: object) -> object:
        if type(value) in types and (type(value), value) in made:
            return made[type(value), value]
        raise wrong(f"expected {expected(kind)}, got {describe(value)}")

    return hook


def checked_hook(kind: object, converter: Converter) -> Hook:
    """Return the hook of an `Annotated` type: that of the type, then its checks in their order.

    The length of a list or an object is checked before its items are read, since a client chooses their number.
    """
    inner, *checks = get_args(kind)
    read = converter.get_structure_hook(inner)
    lengths = [check for check in checks if isinstance(check, Holds)]
    containers = {list, dict}.intersection(reader_types(inner)) if lengths else frozenset()

    def hook(value: object, _: object) -> object:
        if type(value) in containers:
            for length in lengths:
                if mistake := length.mistake(value):
                    raise wrong(mistake)
        result: object = read(value, inner)
        for check in checks:
            if mistake := check.mistake(result):
                raise wrong(mistake)
        return result

    return hook


def _read_each(
    entries: Iterable[tuple[Place, object]], read: Callable[[Place, object], T], item_kind: object
) -> list[T]:
    """Return each item, read with its place; raises one error for the mistakes in all items."""
    results: list[T] = []
    errors: list[Exception] = []
    for place, item in entries:
        try:
            results.append(read(place, item))
        except (CattrsError, Mistakes) as error:
            error.add_note(IterableValidationNote("", place, item_kind))
            errors.append(error)
            if len(errors) == MISTAKES_MAX:
                break
    if errors:
        raise IterableValidationError("some items", errors, list)
    return results


def sequence_hook(kind: object, converter: Converter) -> Hook:
    """Return the hook of a list, or of a tuple of any length."""
    make: Callable[[list[object]], object] = list if get_origin(kind) is list else tuple
    item_kind = get_args(kind)[0]
    if get_args(kind)[1:] not in ((), (...,)):
        raise TypeError(f"{kind}: only lists of one kind can be read")
    read = converter.get_structure_hook(item_kind)

    def hook(value: object, _: object) -> object:
        if not isinstance(value, list):
            raise wrong(f"expected a list, got {describe(value)}")
        if len(value) > ITEMS_MAX:
            raise wrong(f"holds {len(value)} items; at most {ITEMS_MAX} are read")
        return make(_read_each(enumerate(value), lambda _, item: read(item, item_kind), item_kind))

    return hook


def read_mapping(value: object) -> dict[str, object]:
    """Return an object with at most `ITEMS_MAX` keys; raises `Mistakes` for anything else."""
    if not isinstance(value, dict):
        raise wrong(f"expected an object, got {describe(value)}")
    if len(value) > ITEMS_MAX:
        raise wrong(f"holds {len(value)} keys; at most {ITEMS_MAX} are read")
    return value


def mapping_hook(kind: object, converter: Converter) -> Hook:
    """Return the hook of a dictionary whose keys and items have one type each."""
    key_kind, item_kind = get_args(kind)
    read_key, read = converter.get_structure_hook(key_kind), converter.get_structure_hook(item_kind)

    def read_entry(key: str, item: object) -> tuple[object, object]:
        # The item first: a wrong key must not hide mistakes below it.
        value = read(item, item_kind)
        return read_key(key, key_kind), value

    def hook(value: object, _: object) -> object:
        return dict(_read_each(read_mapping(value).items(), read_entry, item_kind))

    return hook


def union_hook(kind: object, converter: Converter) -> Hook:
    """Return the hook of a union, which chooses a member by the type of the value, and among objects by their tag."""
    members: dict[type, tuple[Hook, object]] = {}
    tagged = [member for member in get_args(kind) if is_tagged(member)]
    if tagged[1:]:
        members[dict] = tagged_hook(tagged, [converter.get_structure_hook(member) for member in tagged]), kind
    others = [member for member in get_args(kind) if not (tagged[1:] and member in tagged)]
    # a float also takes integers, so it comes last and leaves them to an int beside it
    for member in sorted(others, key=lambda member: float in reader_types(member)):
        hook = converter.get_structure_hook(member)
        for reader_type in reader_types(member):
            if reader_type in members and not (reader_type is int and float in reader_types(member)):
                raise TypeError(f"{kind}: two members look alike")
            members.setdefault(reader_type, (hook, member))

    def choose(value: object, _: object) -> object:
        if (entry := members.get(type(value))) is None:
            raise wrong(f"expected {expected(kind)}, got {describe(value)}")
        hook, member = entry
        return hook(value, member)

    return choose


def own_hook(cls: type[ReadsItself]) -> Hook:
    """Return the hook of a class that reads its values itself."""

    def hook(value: object, _: object) -> object:
        if type(value) not in cls.value_types:
            raise wrong(f"expected {expected(cls)}, got {describe(value)}")
        return cls.from_value(value)

    return hook
