"""The formats that a client may require of an answer, and the grammar of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, ClassVar, Literal, Self

import attrs
import msgspec
from attrs import frozen

from protocol.messages.generation import Grammar, GrammarKind
from protocol.strict.checks import Holds, Matches
from protocol.strict.mistakes import Mistake, wrong
from protocol.strict.objects import FieldCheck
from protocol.strict.tagged import tag

JSON_BYTES_MAX = 128 * 1024  # about OpenAI's own limit of a schema
JSON_LEVELS_MAX = 100  # an engine compiles a schema of 300 levels in half a second, one of 800 in twelve seconds
PATTERN_CHARACTERS_MAX = 32 * 1024

FormatName = Annotated[str, Matches("[A-Za-z0-9_-]{1,64}", "1 to 64 of the characters A-Z a-z 0-9 _ -")]
Pattern = Annotated[str, Holds(1, PATTERN_CHARACTERS_MAX)]

_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
# Possessive quantifiers never backtrack, and a string without an end matches up to the end of the text: linear time.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))


@frozen
class JsonObject:
    """A JSON object that only the engine interprets, as text."""

    value_types: ClassVar[tuple[type, ...]] = (dict,)

    text: str

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the object as text; raises `Mistakes` for one that is too large or too deep."""
        try:
            text = msgspec.json.encode(value)
        except RecursionError:
            raise wrong(f"must be nested at most {JSON_LEVELS_MAX} levels deep") from None
        if len(text) > JSON_BYTES_MAX:
            raise wrong(f"must have at most {JSON_BYTES_MAX} bytes as JSON, has {len(text)}")
        if (levels := _levels(text)) > JSON_LEVELS_MAX:
            raise wrong(f"must be nested at most {JSON_LEVELS_MAX} levels deep, is {levels}")
        return cls(text.decode())


@frozen
class JsonObjectOrText(JsonObject):
    """A JSON object, or a string with one, as SGLang allows."""

    value_types: ClassVar[tuple[type, ...]] = (dict, str)

    @classmethod
    def from_value(cls, value: object) -> Self:
        """Return the object as text; raises `Mistakes` for a string that holds none, too."""
        if isinstance(value, str):
            if len(value) > JSON_BYTES_MAX:
                raise wrong(f"must have at most {JSON_BYTES_MAX} bytes, has {len(value)}")
            try:
                value = msgspec.json.decode(value)
            except RecursionError:
                raise wrong(f"must be nested at most {JSON_LEVELS_MAX} levels deep") from None
            except (msgspec.DecodeError, UnicodeError):
                raise wrong("must be an object, or a string that holds one as JSON") from None
            if not isinstance(value, dict):
                raise wrong("must be an object, or a string that holds one as JSON")
        return super().from_value(value)


def _levels(text: bytes) -> int:
    """Return the depth of nesting of a JSON text."""
    return max(accumulate(map(_BRACKETS.__getitem__, _STRINGS.sub(b"", text).translate(None, _NOT_BRACKETS))))


@frozen
class JsonSchema:
    """A JSON schema and its name; answers conform to it whether `strict` is set or not."""

    name: FormatName
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


@frozen
class ResponseFormat:
    """The format of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = attrs.field(metadata=tag())
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of answers, None if any text will do."""
        if self.type == "json_object":
            return _ANY_OBJECT
        return None if self.json_schema is None else Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.schema.text)

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (lambda: _needed(self.type, {"json_schema": self.json_schema}, ("json_schema",)),)


@frozen
class TextFormat:
    """The format of the answer: any text, any JSON object, or JSON of a schema, which has a name."""

    type: Literal["text", "json_object", "json_schema"] = attrs.field(metadata=tag())
    name: FormatName | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        """Return the grammar of answers, None if any text will do."""
        if self.type == "json_object":
            return _ANY_OBJECT
        return None if self.schema is None else Grammar(GrammarKind.JSON_SCHEMA, self.schema.text)

    def checks(self) -> tuple[FieldCheck, ...]:
        """Return the checks of fields against each other."""
        return (
            lambda: _needed(self.type, {"name": self.name}, ("name",)),
            lambda: _needed(self.type, {"schema": self.schema}, ("schema",)),
            lambda: _needed(self.type, {"description": self.description}),
            lambda: _needed(self.type, {"strict": self.strict}),
        )


def _needed(kind: str, fields: Mapping[str, object], needed: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """Yield the missing fields of a schema, and fields of another type than its own."""
    for name, value in fields.items():
        if kind == "json_schema" and value is None and name in needed:
            yield Mistake(name, "is missing")
        elif kind != "json_schema" and value is not None:
            yield Mistake(name, f'belongs to the type "json_schema", and the type is "{kind}"')
