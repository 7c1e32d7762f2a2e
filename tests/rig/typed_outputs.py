"""Models of answers with the types that applications ask for, for clients with structured output.

The lengths are bounded, because a tiny model seldom ends what has no bound. The file needs nothing but pydantic, so that
clients in environments of their own import it, too.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, Field, StringConstraints, WithJsonSchema

DECIMAL: dict[str, object] = {
    "anyOf": [
        {"type": "number"},
        {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,7}0*$)\d{0,4}\.\d{0,2}0*$)"},
    ]
}

Short = Annotated[str, Field(max_length=8)]
Code = Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}[0-9]{3}$")]


class Shade(Enum):
    """A colour."""

    LIGHT = "light"
    DARK = "dark"


class Leaf(BaseModel):
    """A leaf of a tree."""

    veins: Annotated[int, Field(ge=0, le=99)]
    shade: Shade


class Needle(BaseModel):
    """A needle of a tree."""

    kind: Literal["needle"]
    length_mm: Annotated[int, Field(ge=1, le=99)]


class Blade(BaseModel):
    """A broad leaf of a tree."""

    kind: Literal["blade"]
    veins: Annotated[int, Field(ge=0, le=99)]


class Scalars(BaseModel):
    """Plain values."""

    name: Short
    age: Annotated[int, Field(ge=0, le=999)]
    height: float
    old: bool


class Price(BaseModel):
    """A decimal of six digits, as in Pydantic 2.11 to 2.13; the schema of 2.14 has no pattern, and any text is valid."""

    amount: Annotated[Decimal, WithJsonSchema(DECIMAL)]


class Times(BaseModel):
    """A time and a day."""

    planted_at: datetime
    felled_on: date


class Identity(BaseModel):
    """A UUID."""

    id: UUID


class Kinds(BaseModel):
    """Values of enumerations."""

    kind: Literal["oak", "elm", "ash"]
    shade: Shade


class Perhaps(BaseModel):
    """Values that may be missing."""

    leaf: Leaf | None
    name: Short | None = None


class Either(BaseModel):
    """Values of several types."""

    size: Annotated[int, Field(ge=0, le=99)] | Literal["small", "large"]
    part: Leaf | Needle


class Tagged(BaseModel):
    """A union that a key decides."""

    part: Annotated[Needle | Blade, Field(discriminator="kind")]


class Rings(BaseModel):
    """A list with bounds."""

    widths_mm: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(min_length=2, max_length=4)]


class Counts(BaseModel):
    """A mapping."""

    by_name: Annotated[dict[Short, Annotated[int, Field(ge=0, le=99)]], Field(max_length=3)]


class Wood(BaseModel):
    """Models in models."""

    leaves: Annotated[list[Leaf], Field(max_length=2)]
    first: Kinds


class Coded(BaseModel):
    """A text with a pattern."""

    code: Code


TYPES: tuple[type[BaseModel], ...] = (
    *(Scalars, Price, Times, Identity, Kinds, Perhaps),
    *(Either, Tagged, Rings, Counts, Wood, Coded),
)
