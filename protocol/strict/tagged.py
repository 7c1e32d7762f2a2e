"""Objects of several kinds, with the kind in one field, the *tag*: `{"type": "text", ...}`.

A union of classes with different tags is read by the tag alone, so only mistakes of an object's own kind are reported.
A kind of no member is refused by its name: it is legal elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import attrs
from attrs import frozen

from protocol.strict.expected import allowed_values, either
from protocol.strict.mistakes import Mistakes, describe, wrong

_TAG = "espalier.tag"
_NAMED = "espalier.tag.named"


def tag(*, named: bool = True) -> Mapping[str, bool]:
    """Return the metadata of a field that selects its object's kind; kinds beyond its values are not supported.

    `named`: an error about another kind proposes these.
    """
    return {_TAG: True, _NAMED: named}


@frozen
class Tag:
    """The tag of a class: the name of the field, and its values for this class, of which some may be named in errors.

    An object without the field is of the class whose tag has a default.
    """

    name: str
    values: tuple[object, ...]
    named: tuple[object, ...]
    has_default: bool = False

    def check(self, fields: Mapping[str, object]) -> None:
        """Raise `Mistakes` for an object of another kind, before its other keys are read."""
        chosen = fields.get(self.name)
        if isinstance(chosen, str) and chosen not in self.values:
            raise self.unsupported(chosen)

    def unsupported(self, kind: str) -> Mistakes:
        """Return the error for an object of another kind, to be raised."""
        return wrong(f"{describe(kind)} is not supported here; only {self.words} is", self.name, unsupported=True)

    @property
    def words(self) -> str:
        """The values in a sentence."""
        return either(list(map(describe, self.named)))


def tags_of(cls: type[attrs.AttrsInstance]) -> tuple[Tag, ...]:
    """Return the tags of a class."""
    attrs.resolve_types(cls, include_extras=True)
    fields = [field for field in attrs.fields(cls) if field.metadata.get(_TAG)]
    return tuple(map(_tag, fields))


def _tag(field: attrs.Attribute[object]) -> Tag:
    values = allowed_values(field.type)
    return Tag(field.name, values, values if field.metadata[_NAMED] else (), field.default is not attrs.NOTHING)


def is_tagged(kind: object) -> bool:
    """Return whether a kind is a class with a tag."""
    return isinstance(kind, type) and attrs.has(kind) and bool(tags_of(kind))


def tagged_hook(
    members: Sequence[type[attrs.AttrsInstance]], hooks: Sequence[Callable[[object, object], object]]
) -> Callable[[object, object], object]:
    """Return the hook of a union of classes, by the hook of each; raises `TypeError` if their tags do not differ."""
    tags = [tags_of(member)[0] for member in members]
    name = tags[0].name
    every = Tag(
        name,
        tuple(chain.from_iterable(one.values for one in tags)),
        tuple(chain.from_iterable(one.named for one in tags)),
    )
    if len(set(every.values)) < len(every.values) or {one.name for one in tags} != {name}:
        raise TypeError(f"{members}: two members look alike")
    by_value = {
        value: (hook, member) for one, hook, member in zip(tags, hooks, members, strict=True) for value in one.values
    }

    defaults = [(hook, member) for one, hook, member in zip(tags, hooks, members, strict=True) if one.has_default]

    def hook(value: object, _: object) -> object:
        assert isinstance(value, dict)  # the union has chosen this hook by the type of the value
        if name not in value and len(defaults) == 1:
            [(read, member)] = defaults
            return read(value, member)
        chosen = value.get(name)
        if isinstance(chosen, str):
            if (entry := by_value.get(chosen)) is None:
                raise every.unsupported(chosen)
            read, member = entry
            return read(value, member)
        raise wrong(f"expected {every.words}, got {describe(chosen)}" if name in value else "is missing", name)

    return hook
