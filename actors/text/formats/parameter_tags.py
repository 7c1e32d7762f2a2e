"""The arguments of calls whose format writes each parameter by itself, as a grammar.

A string stands as plain text where the type of its parameter says so, which the parser goes by too. Other values are
JSON. The parameters come in the order of the schema.
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

    @property
    def name(self) -> TagPart:
        """The grammar of its name."""
        own = self.parameter
        return regex(own.names) if own.name is None else text(own.name)

    def values(self, excluded: Sequence[str]) -> list[HeldValue]:
        """Return the grammars of its values; a string without an expression has none of the texts `excluded`."""
        own = self.parameter
        if not self.plain or own.strings is None:
            return [HeldValue(json_of(json.loads(own.whole)), string=False)]
        others = [] if own.others is None else [HeldValue(json_of(json.loads(own.others)), string=False)]
        if own.strings == "any":
            return [HeldValue(any_text(excluded), string=True)]
        return [*(HeldValue(regex(pattern), string=True) for pattern in own.strings), *others]


Kinds: TypeAlias = Sequence[Sequence[HeldParameter]]
"""The parameters of each kind of object that may be the arguments of a call."""

Element: TypeAlias = Callable[[HeldParameter], TagPart]
"""Returns the grammar of a parameter with its markers."""


def parameters_in_order(kinds: Kinds, element: Element) -> TagPart:
    """Return the grammar of the parameters of one kind of object; those that are not required may be missing."""
    return either(*(sequence(*(_held(each, element) for each in kind)) for kind in kinds))


def _held(parameter: HeldParameter, element: Element) -> TagPart:
    own, part = parameter.parameter, element(parameter)
    if own.name is None:
        return repeated(part, own.least, own.most)
    return part if own.required else optional(part)
