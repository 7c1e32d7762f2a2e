"""Turns what people write (JSON bodies, TOML files) into frozen attrs classes, strictly, with all mistakes at once.

Nothing is coerced: a `bool` is no integer, `"8000"` is no number, an unknown key is a mistake. An integer may stand
where a number is wanted. `Annotated[X, check]` adds a `Check`; a class may name in `harmless` the keys that it accepts
only while they ask for nothing special, and mark with `tag()` the field that tells its kind; a class with a method
`structured` reads its values itself.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Annotated, ClassVar, Literal, Protocol, Self, TypeGuard, TypeVar, Union, get_args, get_origin

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
from cattrs.gen import make_dict_structure_fn

from protocol.strict.mistakes import Mistake, Mistakes, describe, join, segment, wrong

T = TypeVar("T")
Hook = Callable[[object, object], object]
Harmless = Mapping[str, tuple[object, ...]]
"""Keys that are accepted while their value is null or one of these; a type stands for all values of that type."""

ITEMS_MAX = 16_384
"""The longest list, and the most keys of an object, that are read: more would hold up everybody else meanwhile."""
HINT_MIN = 0.75  # how alike two names must be: a hint that misleads is worse than none
MISTAKES_MAX = 16  # of one list, or unknown keys of one object; whoever has made as many knows where to look

_TAG = "espalier.tag"
_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


class Check(Protocol):
    """What `Annotated` may add to a type."""

    def mistake(self, value: object) -> str | None:
        """Say what is wrong with a value that has the right type."""


class Tagged(Protocol):
    """A class that lists its `harmless` keys."""

    harmless: ClassVar[Harmless]


class ReadsItself(Protocol):
    """A class for values that no list of fields describes."""

    kinds: ClassVar[tuple[type, ...]]  # that a value may have as it comes from a reader

    @classmethod
    def structured(cls, value: object) -> Self:
        """Return a value of one of the `kinds` as this class, or raise `Mistakes`."""


def tag() -> Mapping[str, bool]:
    """Return the metadata of a field whose unknown values are legal elsewhere, but not supported here."""
    return {_TAG: True}


def structure(data: object, cls: type[T], hooks: Mapping[type[object], Hook] | None = None) -> T:
    """Return `data` as a `cls`, or raise `Mistakes` with every mistake in it; `hooks` read classes in their own way."""
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
            for each in error.exceptions:
                where = _where(each)
                yield from _flatten(each, join(path, where), field=bool(where))
        case ForbiddenExtraKeysError():
            yield from _unknown(error, path)
        case KeyError() if field:
            yield Mistake(path, "is missing")
        case ValueError():
            yield Mistake(path, str(error))
        case _:
            raise error  # a bug of ours, which must not be blamed on whoever wrote the data


def _where(error: Exception) -> str:
    for note in reversed(getattr(error, "__notes__", [])):
        if isinstance(note, AttributeValidationNote):
            return segment(note.name)
        if isinstance(note, IterableValidationNote):
            return f"[{note.index}]" if isinstance(note.index, int) else segment(note.index)
    return ""


def _unknown(error: ForbiddenExtraKeysError, path: str) -> Iterator[Mistake]:
    known = [field.name for field in attrs.fields(error.cl)]
    known += [key for key in getattr(error.cl, "harmless", {}) if key not in known]
    keys = sorted(error.extra_fields)
    for key in keys[:MISTAKES_MAX]:
        near = get_close_matches(key, known, n=1, cutoff=HINT_MIN) if len(key) <= 64 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Mistake(join(path, segment(key)), f"is not a key here{hint}")
    if len(keys) > MISTAKES_MAX:
        yield Mistake(path, f"has {len(keys) - MISTAKES_MAX} more keys that are not known here")


# What is expected, in words and by kind ------------------------------------------------


def _reads_itself(kind: object) -> TypeGuard[type[ReadsItself]]:
    return isinstance(kind, type) and hasattr(kind, "structured")


def _allowed(kind: object) -> tuple[object, ...]:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(str(member) for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _expected(kind: object) -> str:
    if allowed := _allowed(kind):
        return _either([describe(value) for value in allowed])
    if get_origin(kind) is Annotated:
        return _expected(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return _either([_expected(member) for member in get_args(kind) if member is not types.NoneType])
    if _reads_itself(kind):
        return _either([_WORDS[each] for each in kind.kinds])
    return _WORDS[_kinds(kind)[0]]


def _either(words: list[str]) -> str:
    return " or ".join(([", ".join(words[:-1])] if words[1:] else []) + words[-1:])


def _kinds(kind: object) -> tuple[type, ...]:
    """Return the types that a value of this kind may have as it comes from a JSON or TOML reader."""
    if allowed := _allowed(kind):
        return tuple({type(value): None for value in allowed})
    if _reads_itself(kind):
        return kind.kinds
    origin = get_origin(kind)
    if origin is Annotated:
        return _kinds(get_args(kind)[0])
    if origin in (list, tuple):
        return (list,)
    if origin is dict or (isinstance(kind, type) and attrs.has(kind)):
        return (dict,)
    if isinstance(kind, type) and kind in (bool, int, float, str, types.NoneType):
        return (float, int) if kind is float else (kind,)
    raise TypeError(f"{kind} cannot be told apart in a union")


# Hooks ----------------------------------------------------------------------------------


def _scalar(kind: type) -> Hook:
    def hook(value: object, wanted: object) -> object:
        if wanted is not kind:
            raise TypeError(f"{wanted} cannot be read: {kind} can, its subclasses cannot")
        if type(value) is kind:
            return value
        raise wrong(f"expected {_expected(kind)}, got {describe(value)}")

    return hook


def _number(value: object, _: object) -> float:
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
def _choice(kind: object) -> Hook:
    values = _allowed(kind)
    make: Callable[[object], object] = kind if isinstance(kind, type) else lambda value: value

    def hook(value: object, _: object) -> object:
        if any(type(value) is type(each) and value == each for each in values):
            return make(value)
        raise wrong(f"expected {_expected(kind)}, got {describe(value)}")

    return hook


def _checked(kind: object, converter: Converter) -> Hook:
    inner, *checks = get_args(kind)
    read = converter.get_structure_hook(inner)

    def hook(value: object, _: object) -> object:
        result: object = read(value, inner)
        for check in checks:
            if complaint := check.mistake(result):
                raise wrong(complaint)
        return result

    return hook


def _sequence(kind: object, converter: Converter) -> Hook:
    make: Callable[[list[object]], object] = list if get_origin(kind) is list else tuple
    item = get_args(kind)[0]
    if get_args(kind)[1:] not in ((), (...,)):
        raise TypeError(f"{kind}: only lists of one kind can be read")
    read = converter.get_structure_hook(item)

    def hook(value: object, _: object) -> object:
        if not isinstance(value, list):
            raise wrong(f"expected a list, got {describe(value)}")
        if len(value) > ITEMS_MAX:
            raise wrong(f"holds {len(value)} items; at most {ITEMS_MAX} are read")
        result: list[object] = []
        errors: list[Exception] = []
        for index, each in enumerate(value):
            try:
                result.append(read(each, item))
            except (CattrsError, Mistakes) as error:
                error.add_note(IterableValidationNote("", index, item))
                errors.append(error)
                if len(errors) == MISTAKES_MAX:
                    break
        if errors:
            raise IterableValidationError("a list", errors, list)
        return make(result)

    return hook


def _mapped(value: object) -> dict[str, object]:
    """Return an object that is not too large to be looked at; whoever sent it chose how many keys it has."""
    if not isinstance(value, dict):
        raise wrong(f"expected an object, got {describe(value)}")
    if len(value) > ITEMS_MAX:
        raise wrong(f"holds {len(value)} keys; at most {ITEMS_MAX} are read")
    return value


def _mapping(kind: object, converter: Converter) -> Hook:
    key_kind, item = get_args(kind)
    read_key, read = converter.get_structure_hook(key_kind), converter.get_structure_hook(item)

    def hook(value: object, _: object) -> object:
        value = _mapped(value)
        result: dict[object, object] = {}
        errors: list[Exception] = []
        for key, each in value.items():
            try:
                result[read_key(key, key_kind)] = read(each, item)
            except (CattrsError, Mistakes) as error:
                error.add_note(IterableValidationNote("", str(key), item))
                errors.append(error)
                if len(errors) == MISTAKES_MAX:
                    break
        if errors:
            raise IterableValidationError("a mapping", errors, dict)
        return result

    return hook


def _union(kind: object, converter: Converter) -> Hook:
    members: dict[type, tuple[Hook, object]] = {}
    # a float also takes integers, so it comes last and leaves them to an int beside it
    for member in sorted(get_args(kind), key=lambda member: float in _kinds(member)):
        hook = converter.get_structure_hook(member)
        for each in _kinds(member):
            if each in members and not (each is int and float in _kinds(member)):
                raise TypeError(f"{kind}: two members look alike")
            members.setdefault(each, (hook, member))

    def choose(value: object, _: object) -> object:
        if (found := members.get(type(value))) is None:
            raise wrong(f"expected {_expected(kind)}, got {describe(value)}")
        hook, member = found
        return hook(value, member)

    return choose


def _self_made(cls: type[ReadsItself]) -> Hook:
    def hook(value: object, _: object) -> object:
        if type(value) not in cls.kinds:
            raise wrong(f"expected {_expected(cls)}, got {describe(value)}")
        return cls.structured(value)

    return hook


def _object(cls: type[attrs.AttrsInstance], converter: Converter) -> Hook:
    attrs.resolve_types(cls, include_extras=True)
    read = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)
    tags = [(field.name, field.type) for field in attrs.fields(cls) if field.metadata.get(_TAG)]
    harmless: Harmless = getattr(cls, "harmless", {})

    def hook(value: object, _: object) -> object:
        value = _mapped(value)
        for name, kind in tags:
            said = value.get(name)
            if isinstance(said, str) and said not in _allowed(kind):  # then its other keys mean nothing to us
                complaint = f"{describe(said)} is not supported here; only {_expected(kind)} is"
                raise wrong(complaint, name, unsupported=True)
        if harmless.keys().isdisjoint(value):
            return read(value, cls)
        errors: list[Exception] = [*_harmful(value, harmless)]
        try:
            result = read({key: each for key, each in value.items() if key not in harmless}, cls)
        except ClassValidationError as error:
            raise ClassValidationError("an object", [*errors, *error.exceptions], cls) from None
        if errors:
            raise ClassValidationError("an object", errors, cls)
        return result

    return hook


def _harmful(value: Mapping[str, object], harmless: Harmless) -> Iterator[Mistakes]:
    for key, fine in harmless.items():
        said = value.get(key)
        if said is None or any(_same(said, each) for each in fine):
            continue
        if fine and all(isinstance(each, type) for each in fine):
            words = _either([_WORDS[each] for each in fine if isinstance(each, type)])
            yield wrong(f"expected {words}, got {describe(said)}", key)
        else:
            named = [describe(each) for each in fine if isinstance(each, str | int)]
            instead = f"only {_either(named)} is" if named else "leave it out"
            yield wrong(f"{describe(said)} is not supported here; {instead}", key, unsupported=True)


def _same(said: object, fine: object) -> bool:
    if isinstance(fine, type):
        return type(said) is fine
    if type(said) is not type(fine):
        return False  # 0 is not False, and 1 not True
    if isinstance(said, dict) and isinstance(fine, dict):
        said = {key: each for key, each in said.items() if each is not None}
        return said.keys() == fine.keys() and all(_same(said[key], fine[key]) for key in fine)
    if isinstance(said, list) and isinstance(fine, list):
        return len(said) == len(fine) and all(map(_same, said, fine))
    return said == fine


def _make_converter(hooks: Mapping[type[object], Hook]) -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for scalar in (bool, int, str, types.NoneType):
        converter.register_structure_hook(scalar, _scalar(scalar))
    converter.register_structure_hook(float, _number)
    # cattrs takes the hook of the nearest class, and every `StrEnum` is a `str`
    converter.register_structure_hook(StrEnum, lambda value, kind: _choice(kind)(value, kind))

    def register(origins: tuple[object, ...], factory: Callable[[object, Converter], Hook]) -> None:
        converter.register_structure_hook_factory(
            lambda kind: get_origin(kind) in origins, lambda kind: factory(kind, converter)
        )

    register((list, tuple), _sequence)
    register((dict,), _mapping)
    register((Union, types.UnionType), _union)
    register((Annotated,), _checked)
    register((Literal,), lambda kind, _: _choice(kind))
    converter.register_structure_hook_factory(attrs.has, lambda cls: _object(cls, converter))
    converter.register_structure_hook_factory(_reads_itself, _self_made)
    for cls, hook in hooks.items():
        converter.register_structure_hook(cls, hook)
    return converter


_converter = _make_converter({})
