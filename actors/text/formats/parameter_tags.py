"""The arguments of calls whose format writes each parameter by itself, as a grammar.

A string stands as plain text where the type of its parameter says so, which the parser goes by too. Other values are
JSON. The parameters come in the order of the schema, with a separator between two where a format has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import frozen

from actors.text.formats.call_tags import TagPart, any_text, either, json_of, optional, regex, repeated, sequence, text
from protocol.schemas.parameters import Parameter


@frozen
class HeldValue:
    """The grammar of some values of a parameter; `string` if they are strings as plain text."""

    part: TagPart
    string: bool


@frozen
class HeldParameter:
    """A parameter as an engine is held to it."""

    parameter: Parameter
    plain: bool  # strings stand as plain text
    typed: bool = False  # a value says whether it is a string

    @property
    def name(self) -> TagPart:
        """The grammar of its name."""
        own = self.parameter
        return regex(own.names) if own.name is None else text(own.name)

    def values(self, excluded: Sequence[str]) -> list[HeldValue]:
        """Return the grammars of its values; a string without an expression has none of the texts `excluded`."""
        own = self.parameter
        if not self.plain:
            return [HeldValue(json_of(json.loads(own.whole)), string=False)]
        others = [] if own.others is None else [HeldValue(json_of(json.loads(own.others)), string=False)]
        if own.strings is None:
            # What is left of the schema has strings as well if each of them reads as another value.
            return others
        if own.strings == "any":
            # Any text is read as whatever value it is, unless its type says that it is a string.
            return [HeldValue(any_text(excluded), string=True), *(others if self.typed else ())]
        return [*(HeldValue(regex(pattern), string=True) for pattern in own.strings), *others]


Kinds: TypeAlias = Sequence[Sequence[HeldParameter]]
"""The parameters of each kind of object that may be the arguments of a call."""

Element: TypeAlias = Callable[[HeldParameter], TagPart]
"""Returns the grammar of a parameter with its markers."""


def parameters_in_order(kinds: Kinds, element: Element, separator: str = "") -> TagPart:
    """Return the grammar of the parameters of one kind of object; those that are not required may be missing."""
    return either(*(_in_order([(each.parameter, element(each)) for each in kind], separator) for kind in kinds))


def _in_order(parts: Sequence[tuple[Parameter, TagPart]], separator: str) -> TagPart:
    if not separator:
        return sequence(*(_held(own, part) for own, part in parts))
    if not parts:
        return text("")
    first = next((place for place, (own, _) in enumerate(parts) if own.required), None)
    if first is None:
        return _any_of(parts, separator)
    # The first that is required is there in any case. So each one before it has its separator behind it, and each one
    # behind it has its separator before it: no part is written twice.
    before = (optional(sequence(part, separator)) for _, part in parts[:first])
    return sequence(*before, parts[first][1], *_behind(parts[first + 1 :], separator))


def _any_of(parts: Sequence[tuple[Parameter, TagPart]], separator: str) -> TagPart:
    """Return the grammar of parameters none of which is required."""
    [(own, part), *others] = parts
    if own.name is None and not others:
        if own.most == 0:
            return text("")
        more = repeated(sequence(separator, part), max(0, own.least - 1), None if own.most is None else own.most - 1)
        return sequence(part, more) if own.least else optional(sequence(part, more))
    return optional(_some_of(parts, separator))


def _some_of(parts: Sequence[tuple[Parameter, TagPart]], separator: str) -> TagPart:
    """Return the grammar of one or more of these: one of the first half and any behind it, or one of the second half.

    Each part is written once for each halving, so the grammar is not as long as the square of their number.
    """
    if len(parts) == 1:
        return parts[0][1]
    half = len(parts) // 2
    behind = _behind(parts[half:], separator)
    return either(sequence(_some_of(parts[:half], separator), *behind), _some_of(parts[half:], separator))


def _behind(parts: Sequence[tuple[Parameter, TagPart]], separator: str) -> list[TagPart]:
    return [_held(own, sequence(separator, part)) for own, part in parts]


def _held(own: Parameter, part: TagPart) -> TagPart:
    """Return the grammar of a parameter that may be missing, or of several of any name."""
    if own.name is None:
        return repeated(part, own.least, own.most)
    return part if own.required else optional(part)
