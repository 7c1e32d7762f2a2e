"""What clients may ask an answer to look like, and the grammar that each such wish becomes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, ClassVar, Literal, Self

import attrs
import msgspec
from attrs import frozen

from protocol.dialects.request_body import STRING
from protocol.messages import Grammar, GrammarKind
from protocol.strict.checks import Holds, Matches
from protocol.strict.mistakes import Mistake, join, wrong
from protocol.strict.objects import tag

JSON_BYTES_MAX = 128 * 1024  # about what OpenAI takes of a schema
JSON_LEVELS_MAX = 100  # of three times as many an engine makes a grammar in half a second, of eight times in twelve
PATTERN_CHARACTERS_MAX = 32 * 1024

FormatName = Annotated[str, Matches("[A-Za-z0-9_-]{1,64}", "1 to 64 of the characters A-Z a-z 0-9 _ -")]
Pattern = Annotated[str, Holds(1, PATTERN_CHARACTERS_MAX)]

_ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
_STRINGS = re.compile(STRING, re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_STEPS = bytes(set(range(256)) - set(_STEPS))


@frozen
class JsonObject:
    """A JSON object that means something to the engine alone, as its text."""

    kinds: ClassVar[tuple[type, ...]] = (dict,)

    text: str

    @classmethod
    def structured(cls, value: object) -> Self:
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
    """A JSON object that may also come as a string which holds one, as SGLang has it."""

    kinds: ClassVar[tuple[type, ...]] = (dict, str)

    @classmethod
    def structured(cls, value: object) -> Self:
        """Return the object as text; raises `Mistakes` for text that is none, too."""
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
        return super().structured(value)


def _levels(text: bytes) -> int:
    """Return how deep JSON is nested."""
    return max(accumulate(map(_STEPS.__getitem__, _STRINGS.sub(b"", text).translate(None, _NO_STEPS))))


@frozen
class JsonSchema:
    """The schema of chat completions, under its name; `strict` or not, every answer keeps to it."""

    name: FormatName
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None


@frozen
class ResponseFormat:
    """`response_format` of chat completions."""

    type: Literal["text", "json_object", "json_schema"] = attrs.field(metadata=tag())
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        """Return what answers must look like, None for any text."""
        if self.type == "json_object":
            return _ANY_OBJECT
        return None if self.json_schema is None else Grammar(GrammarKind.JSON_SCHEMA, self.json_schema.schema.text)

    def mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield what is wrong between fields that are each right."""
        yield from _needed(self.type, path, {"json_schema": self.json_schema}, ("json_schema",))


@frozen
class TextFormat:
    """`text.format` of Responses, which has the schema beside its name."""

    type: Literal["text", "json_object", "json_schema"] = attrs.field(metadata=tag())
    name: FormatName | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> Grammar | None:
        """Return what answers must look like, None for any text."""
        if self.type == "json_object":
            return _ANY_OBJECT
        return None if self.schema is None else Grammar(GrammarKind.JSON_SCHEMA, self.schema.text)

    def mistakes(self, path: str) -> Iterator[Mistake]:
        """Yield what is wrong between fields that are each right."""
        fields = {"name": self.name, "schema": self.schema, "description": self.description, "strict": self.strict}
        yield from _needed(self.type, path, fields, ("name", "schema"))


def _needed(kind: str, path: str, fields: Mapping[str, object], needed: tuple[str, ...]) -> Iterator[Mistake]:
    """Yield which fields of a schema are missing, or stand where no schema is asked for."""
    for name, value in fields.items():
        if kind == "json_schema" and value is None and name in needed:
            yield Mistake(join(path, name), "is missing")
        elif kind != "json_schema" and value is not None:
            yield Mistake(join(path, name), f'belongs to the type "json_schema", and the type is "{kind}"')
