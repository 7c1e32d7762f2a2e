"""Schemas by a seeded generator: realistic ones most of all, and every keyword in combination with others."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import TypeAlias

from attrs import define

Schema: TypeAlias = dict[str, object] | bool

NAMES = ("a", "b", "kind", "name", "x y", "é", 'a"b', "$ref", "value", "", "\n\t", "\x01", "😀", "\\", "/", "~1")
PATTERNS = (
    *("^[a-z]+$", "[^a]*", r"\d{2,4}", r"^\w+@\w+\.com$", "a|b", "^x", "y$", ".*", r"\S+", r"[\s\S]*", r"^\\$", "^$"),
    *(r"^[A-Z]{2}\d{3}$", "(ab|c)*d", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", '^"a?$', "é+", r"[^\x00-\x7f]", r"^[\d-]+$"),
    *("(?=a)b", r"\bword\b", "a|a{1,3}", "(?:xb*)?y", "^((a{3,4}){2})?c$", '^[^"]{1,3}$'),
)
PARTS = (
    "a",
    "b",
    "0",
    "é",
    "😀",
    " ",
    r"\.",
    '"',
    r"\\",
    r"\n",
    r"\u0041",
    "[a-z]",
    "[^a]",
    r"\d",
    r"\w",
    r"\s",
    r"\W",
    ".",
    "[一-龠]",
)
FORMATS = (
    "date",
    "date-time",
    "time",
    "duration",
    "uuid",
    "email",
    "uri",
    "ipv4",
    "ipv6",
    "hostname",
    "password",
    "regex",
)
VALUES: tuple[object, ...] = (
    *(None, True, False, 0, 1, 1.0, -5, 2.5, 0.1, 1e-7, -0.0, "a", "b", "", 'é\n"\\', "\x00\x1f\u2028😀", "</s>"),
    *([1, "a"], [], {}, {"a": 1}, "2024-01-01", {"a": [True]}),
)
NUMBERS = (0, 1, -1, 5, 10, 100, 0.5, -2.5, 1.25, 0.1, 1e-7, 123456, 1e9, -3, 2**40, 1e16, 3.000001)
REFUSED: tuple[dict[str, object], ...] = (
    {"not": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"nullable": True},
    {"unevaluatedProperties": False},
    {"contains": {}},
)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
LEVELS = 4


@define
class Draw:
    """Draws from one seed."""

    rng: Random

    def text(self) -> str:
        """Return a schema with definitions."""
        schema = self.schema(0)
        while not isinstance(schema, dict):
            schema = self.schema(0)
        here = {"$anchor": "here", "type": "object", "properties": {"next": {"$ref": "#here"}}}
        return json.dumps({**schema, "$defs": {"p": self.schema(2), "q": self.schema(2), "z": here}})

    def schema(self, level: int) -> Schema:
        """Return a schema at a level of nesting."""
        if level > LEVELS or self._chance(0.03):
            plain: list[Schema] = [True, {}, {"type": "null"}, {"type": "string"}]
            return self.rng.choice(plain)
        schema = self._main(level)
        if self._chance(0.15):
            schema = {**self._main(level + 2), **schema}
        if self._chance(0.15):
            schema |= {"title": "T", "description": "d", "default": self.rng.choice(VALUES)}
        if self._chance(0.05):
            schema["type"] = self.rng.sample(TYPES, self.rng.randint(1, 3))
        if self._chance(0.02):
            schema |= self.rng.choice(REFUSED)
        return schema

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def _main(self, level: int) -> dict[str, object]:
        unions = self.rng.choice(["anyOf", "anyOf", "oneOf"])
        draws: tuple[Callable[[], dict[str, object]], ...] = (
            self._scalar,
            lambda: self._object(level),
            lambda: self._array(level),
            lambda: {"enum": [self.rng.choice(VALUES) for _ in range(self.rng.randint(1, 5))]},
            lambda: {"const": self.rng.choice(VALUES)},
            lambda: {unions: self._several(level)},
            lambda: {"allOf": self._several(level)},
            lambda: {"$ref": self.rng.choice(["#/$defs/p", "#/$defs/q", "#", "#here"])},
        )
        return self.rng.choices(draws, (16, 34, 16, 8, 4, 8, 6, 8))[0]()

    def _several(self, level: int) -> list[Schema]:
        return [self.schema(level + 1) for _ in range(self.rng.randint(1, 3))]

    def _scalar(self) -> dict[str, object]:
        kind = self.rng.choice(["string", "string", "integer", "integer", "number", "number", "boolean", "null"])
        schema: dict[str, object] = {"type": kind} if self._chance(0.9) else {}
        if kind == "string":
            schema |= self._maybe(0.3, minLength=self.rng.randint(0, 4))
            schema |= self._maybe(0.3, maxLength=self.rng.choice([0, 1, 3, 5, 8, 200]))
            schema |= self._maybe(0.3, pattern=self._pattern()) or self._maybe(0.3, format=self.rng.choice(FORMATS))
        if kind in {"integer", "number"}:
            for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                schema |= self._maybe(0.25, **{keyword: self._number()})
            schema |= self._maybe(0.06, multipleOf=self.rng.choice([1, 2, 5, 0.5, 0.01, 1.0]))
        return schema

    def _maybe(self, share: float, **keyword: object) -> dict[str, object]:
        return keyword if self._chance(share) else {}

    def _number(self) -> float:
        if self._chance(0.6):
            return self.rng.choice(NUMBERS)
        return self.rng.choice(
            [round(self.rng.uniform(-1000, 1000), self.rng.randint(0, 8)), self.rng.randint(-(10**12), 10**12)]
        )

    def _pattern(self) -> str:
        if self._chance(0.5):
            return self.rng.choice(PATTERNS)
        part = self._part(0)
        return self.rng.choice([f"^{part}$", f"^(?:{part})$", part, f"^{part}|{self._part(2)}$"])

    def _part(self, level: int) -> str:
        match self.rng.choices(range(4), (45 + 30 * level, 25, 12, 18))[0]:
            case 0:
                return self.rng.choice(PARTS)
            case 1:
                return self._part(level + 1) + self._part(level + 1)
            case 2:
                return f"(?:{self._part(level + 1)}|{self._part(level + 1)})"
            case _:
                return f"({self._part(level + 1)})" + self.rng.choice(
                    ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "+?"]
                )

    def _object(self, level: int) -> dict[str, object]:
        schema: dict[str, object] = {"type": "object"} if self._chance(0.9) else {}
        names = self.rng.sample(NAMES, self.rng.randint(0, 4))
        if names and self._chance(0.9):
            schema["properties"] = {name: self.schema(level + 1) for name in names}
        pool = names if names and self._chance(0.85) else NAMES
        schema |= self._maybe(0.6, required=self.rng.sample(pool, self.rng.randint(0, min(2, len(pool)))))
        schema |= self._maybe(0.35, additionalProperties=self.rng.choice([False, False, True, self.schema(level + 2)]))
        schema |= self._maybe(0.08, patternProperties={self._pattern(): self.schema(level + 2)})
        name_schemas: list[object] = [
            {"pattern": "^[a-z]+$"},
            {"enum": ["a", "b"]},
            {"maxLength": 3},
            {"format": "uuid"},
        ]
        schema |= self._maybe(0.06, propertyNames=self.rng.choice(name_schemas))
        schema |= self._maybe(0.08, minProperties=self.rng.randint(0, 3))
        schema |= self._maybe(0.08, maxProperties=self.rng.randint(0, 3))
        schema |= self._maybe(0.05, dependentRequired={self.rng.choice(NAMES): [self.rng.choice(NAMES)]})
        return schema | self._maybe(0.04, dependentSchemas={self.rng.choice(NAMES): self.schema(level + 2)})

    def _array(self, level: int) -> dict[str, object]:
        schema: dict[str, object] = {"type": "array"} if self._chance(0.9) else {}
        schema |= self._maybe(0.7, items=self.schema(level + 1))
        schema |= self._maybe(0.25, prefixItems=self._several(level))
        schema |= self._maybe(0.3, minItems=self.rng.randint(0, 3))
        schema |= self._maybe(0.3, maxItems=self.rng.randint(0, 4))
        return schema | self._maybe(0.08, uniqueItems=self.rng.choice([True, True, False]))
