"""Pydantic's types as schemas: answers under them parse as the type, or the keyword that cannot be kept is refused."""

from __future__ import annotations

import datetime as dt
import enum
import ipaddress
import json
import random
import re
import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter

pytest.importorskip("xgrammar")  # it comes with an engine

from protocol.schemas.decimals import without_look_ahead
from protocol.schemas.enforceable import Unenforceable, enforceable
from protocol.schemas.patterns import string_expression
from tests.protocol.schemas.test_formats import drawn
from tests.rig.schema_answers import answer, compiled, fault


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, Field(min_length=1, max_length=8)]


class Owner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    pet: Annotated[Cat | Dog, Field(discriminator="kind", description="beside $ref")]
    other: Cat | None = Field(default=None, description="beside a union")
    colour: Colour = Field(default=Colour.RED, description="beside $ref")
    tags: dict[str, int] = {}


class Tree(BaseModel):
    value: int
    children: list[Tree] = Field(default=[], max_length=2)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


@dataclass
class Point:
    x: float
    y: float = 0.0


KEPT: dict[str, object] = {
    **{each.__name__: each for each in (int, float, bool, str, type(None), Colour, Cat, Dog, Owner, Tree, Open, Point)},
    **{each.__name__: each for each in (dt.date, dt.time, dt.datetime, dt.timedelta, uuid.UUID, AnyUrl)},
    **{each.__name__: each for each in (ipaddress.IPv4Address, ipaddress.IPv6Address)},
    "bounds": Annotated[int, Field(gt=3, lt=10)],
    "fractions": Annotated[float, Field(gt=0, le=1)],
    "multiples": Annotated[int, Field(ge=0, le=100, multiple_of=25)],
    "pattern and length": Annotated[str, Field(pattern=r"^[a-z]+$", min_length=2, max_length=5)],
    "bounded list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[bool, ...],
    "literals": Literal["a", "b", 3] | None,
    "union": int | str | list[bool] | None,
    "map": dict[str, list[int]],
    "map of listed names": dict[Literal["a", "b"], int],
    "map of matching names": dict[Annotated[str, Field(pattern="^[a-c]{2}$")], int],
    "nested optionals": dict[str, list[int | None] | None] | None,
}


@pytest.mark.parametrize("name", KEPT)
def test_answers_parse_as_the_type(name: str) -> None:
    adapter: TypeAdapter[object] = TypeAdapter(KEPT[name])  # type: ignore[arg-type]
    schema = json.dumps(adapter.json_schema())
    grammar, ended = compiled(enforceable(schema)), 0
    for manner in ("shortest", "random", "rare", "single"):
        written = answer(grammar, random.Random(name + manner), manner)
        if written is not None:
            ended += 1
            assert fault(schema, written) is None
            adapter.validate_json(written)
    assert ended


@pytest.mark.parametrize(
    ("kind", "keyword"),
    [
        (set[int], "uniqueItems"),
        (Annotated[float, Field(multiple_of=0.01)], "multipleOf"),
        (Annotated[int, Field(multiple_of=7)], "multipleOf"),
        (ipaddress.IPv4Network, "format"),
        (dict[uuid.UUID, set[str]], "uniqueItems"),
    ],
)
def test_what_cannot_be_kept_of_a_type_is_refused_by_keyword(kind: object, keyword: str) -> None:
    adapter: TypeAdapter[object] = TypeAdapter(kind)  # type: ignore[arg-type]
    with pytest.raises(Unenforceable) as caught:
        enforceable(json.dumps(adapter.json_schema()))
    assert caught.value.keyword == keyword


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,3}0*$",
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,0}0*$",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d{0,5}\.\d{0,5}0*$)",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,5}|(?=[\d.]{1,8}0*$)\d{0,5}\.\d{0,2}0*$)",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)",
        r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)",
    ],
)
def test_decimals_with_a_look_ahead_are_written_without(pattern: str) -> None:
    assert "(?!" not in without_look_ahead(pattern)
    tree, rng = string_expression(pattern), random.Random(pattern)
    texts = {drawn(tree, rng) for _ in range(300)}
    assert len(texts) > 5
    assert [text for text in texts if re.search(pattern, text) is None] == []
