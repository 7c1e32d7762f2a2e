"""JSON Schemas of requests, made from the classes and checks of their parsers, so the two cannot differ.

A type or a check without a keyword here raises `TypeError`, so the document cannot lack a limit silently.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias, Union, get_args, get_origin

import attrs
from attrs import Factory, define

from protocol.dialects.embeddings import INPUTS_MAX, Inputs, Texts
from protocol.dialects.formats import JSON_BYTES_MAX, JSON_LEVELS_MAX, JsonObject, JsonObjectOrText
from protocol.dialects.media_urls import URL_CHARACTERS_MAX, EmbeddingsFile, LocatesMedia
from protocol.dialects.options import CHOICES_MAX, INT32_MAX, SpellsTokenId, TopK
from protocol.dialects.prompt import IDS_MAX, Prompts, TokenIdList
from protocol.dialects.rendering import ChatTemplateKwargs
from protocol.dialects.responses.tools import OtherTool
from protocol.dialects.tools import MODES, Arguments, ChosenTool
from protocol.strict.checks import Holds, Matches, Within
from protocol.strict.hooks import ITEMS_MAX
from protocol.strict.objects import Harmless

Schema: TypeAlias = dict[str, object]
More: TypeAlias = Mapping[type, Callable[[Schema], Schema]]
"""By class, what it requires besides its fields: a function from its schema to the complete one."""

NULL: Schema = {"type": "null"}
_PLAIN: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    types.NoneType: "null",
}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_OBJECT: Schema = {"type": "object", "description": f"Nested at most {JSON_LEVELS_MAX} levels deep."}
_TEXT: Schema = {"type": "string", "contentMediaType": "application/json", "maxLength": JSON_BYTES_MAX}
_NEVER: Schema = {"not": {}}
_CHOSEN_MODE: Schema = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": [*MODES]}},
    "required": ["type"],
    "maxProperties": 1,
}
_NAMED: Schema = {"required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}
_CHOSEN_FUNCTION: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}},
    "required": ["type"],
    "if": {"required": ["function"]},
    "then": {"properties": {"function": {"type": "object", **_NAMED}}},
    "else": _NAMED,
}
_SEVERAL: Schema = {"minItems": 1, "maxItems": CHOICES_MAX}
_SEVERAL_INPUTS: Schema = {"minItems": 1, "maxItems": INPUTS_MAX}
_TEXT_OPTIONS: list[Schema] = [
    {"type": "string", "minLength": 1},
    {"type": "array", "items": {"type": "string", "minLength": 1}, **_SEVERAL_INPUTS},
]
_OWN: dict[object, Schema] = {
    JsonObject: _OBJECT,
    JsonObjectOrText: {"anyOf": [_OBJECT, _TEXT]},
    ChatTemplateKwargs: {**_OBJECT, "description": "Variables of the model's chat template, by name."},
    Arguments: {"type": "string", "contentMediaType": "application/json", "description": "The JSON of an object."},
    ChosenTool: {"anyOf": [{"type": "string", "enum": [*MODES]}, _CHOSEN_MODE, _CHOSEN_FUNCTION]},
    OtherTool: _NEVER,
    TokenIdList: {**_IDS, "maxItems": IDS_MAX},
    EmbeddingsFile: {"type": "string", "contentEncoding": "base64", "minLength": 1},
    Texts: {"anyOf": _TEXT_OPTIONS},
    Inputs: {
        "anyOf": [
            *_TEXT_OPTIONS,
            {**_IDS, "maxItems": IDS_MAX},
            {"type": "array", "items": {**_IDS, "maxItems": IDS_MAX}, **_SEVERAL_INPUTS},
        ]
    },
    Prompts: {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, **_SEVERAL},
            {**_IDS, "maxItems": IDS_MAX},
            {"type": "array", "items": {**_IDS, "maxItems": IDS_MAX}, **_SEVERAL},
        ]
    },
}


def _any_case(word: str) -> str:
    """Return a pattern of a word in small letters or capitals: the patterns of JSON Schema have no flag for case."""
    return "".join(f"[{each}{each.upper()}]" if each.isalpha() else each for each in word)


_MEDIA_URL = (
    f"^({_any_case('data')}:[^,]{{0,244}}{_any_case(';base64')},[\\s\\S]+"
    f"|({_any_case('https')}|{_any_case('http')})://[!-~]+|{_any_case('file')}:/[!-~]+)$"
)
_MEDIA_EXAMPLES = ["data:image/png;base64,iVBORw0KGgo=", "https://media.example/cat.png", "file:///srv/media/cat.png"]


@define(eq=False)
class Schemas:
    """The schemas of classes by name, each written once and completed by `more`; `own` replaces the schemas of some."""

    more: More
    own: Mapping[object, Schema] = Factory(dict)
    named: dict[str, Schema] = Factory(dict)
    _names: dict[type, str] = Factory(dict)

    def schema(self, kind: object) -> Schema:
        """Return the schema of a type, or a reference to that of a class; raises `TypeError` for a type without one."""
        if isinstance(kind, type) and kind in _OWN:
            return self.own.get(kind, _OWN[kind])
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return {"type": "string", "enum": [str(member) for member in kind]}
        if isinstance(kind, type) and attrs.has(kind):
            return self._reference(kind)
        return self._made_of(get_origin(kind), get_args(kind), kind)

    def _made_of(self, origin: object, parts: tuple[object, ...], kind: object) -> Schema:
        if origin is Literal:
            return {"type": "string", "enum": list(parts)}
        if origin is Annotated:
            inner, *checks = parts
            schema = self.schema(inner)
            for check in checks:
                schema = {**schema, **_keywords(check, schema)}
            return schema
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.schema(part) for part in parts]}
        if origin in (list, tuple):
            return {"type": "array", "items": self.schema(parts[0]), "maxItems": ITEMS_MAX}
        if origin is dict:
            keys, items = map(self.schema, parts)
            return {"type": "object", "propertyNames": keys, "additionalProperties": items, "maxProperties": ITEMS_MAX}
        raise TypeError(f"{kind} has no schema")

    def _reference(self, cls: type[attrs.AttrsInstance]) -> Schema:
        if cls not in self._names:
            name = cls.__name__
            while name in self.named:  # two dialects may have classes of the same name
                name = f"{_dialect(cls).capitalize()}{name}"
            self._names[cls], self.named[name] = name, {}
            schema, more = self._object(cls), self.more.get(cls)
            self.named[name] = schema if more is None else more(schema)
        return {"$ref": f"#/components/schemas/{self._names[cls]}"}

    def _object(self, cls: type[attrs.AttrsInstance]) -> Schema:
        attrs.resolve_types(cls, include_extras=True)
        fields = attrs.fields(cls)
        harmless: Harmless = getattr(cls, "harmless", {})
        properties = {field.name: self.schema(field.type) for field in fields}
        properties |= {name: _harmless(values) for name, values in harmless.items()}
        return {
            "type": "object",
            "description": (cls.__doc__ or "").strip().partition("\n")[0].replace("`", ""),
            "properties": properties,
            "required": [field.name for field in fields if field.default is attrs.NOTHING],
            "additionalProperties": False,
        }


def _dialect(cls: type) -> str:
    """Return the dialect of a class: the name of its module or, if the dialect is a folder, of that."""
    return cls.__module__.partition(".dialects.")[2].partition(".")[0]


def without_null(schema: Schema) -> Schema:
    """Return a schema that no longer allows null."""
    options = schema["anyOf"]
    assert isinstance(options, list)
    remaining = [option for option in options if option != NULL]
    return remaining[0] if len(remaining) == 1 else {"anyOf": remaining}


def _harmless(values: tuple[object, ...]) -> Schema:
    options = [_accepted(value) for value in values]
    return {"anyOf": [NULL, *options]} if options else NULL


def _accepted(value: object) -> Schema:
    if isinstance(value, type):
        return {"type": _PLAIN[value]}
    if isinstance(value, dict):  # in which null is as good as a missing key
        properties = {key: _accepted(item) for key, item in value.items()}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": NULL}
    return {"const": value}


def _keywords(check: object, schema: Schema) -> Schema:
    match check:
        case Within():
            bounds = {"minimum": check.at_least, "exclusiveMinimum": check.above, "maximum": check.at_most}
            return {name: bound for name, bound in bounds.items() if bound is not None}
        case Holds():
            unit = {"string": "Length", "array": "Items"}.get(str(schema["type"]), "Properties")
            sizes = {f"min{unit}": check.at_least or None, f"max{unit}": check.at_most}
            return {name: size for name, size in sizes.items() if size is not None}
        case Matches():
            return {"pattern": f"^({check.pattern})$"}
        case LocatesMedia():
            description = f"At most {URL_CHARACTERS_MAX} characters, but for a data URL."
            return {"pattern": _MEDIA_URL, "description": description, "examples": _MEDIA_EXAMPLES}
        case TopK():
            return {"anyOf": [{"const": -1}, {"minimum": 1, "maximum": INT32_MAX}]}
        case SpellsTokenId():
            return {"pattern": "^(0|[1-9][0-9]{0,9})$", "description": f"A token id, at most {INT32_MAX}."}
    raise TypeError(f"{check} has no keywords")
