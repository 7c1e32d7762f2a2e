"""Shapes: the values of one type, in terms of the keywords kept by the grammar backend.

A schema for an engine is a choice of shapes. A shape allows no value that its schemas forbid.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from protocol.schemas.alternatives import Conjunction
from protocol.schemas.expressions import Expression


@frozen
class AnyValue:
    """Any JSON value."""


@frozen
class Values:
    """One of some values, each as JSON text."""

    texts: tuple[str, ...]


@frozen
class Constant:
    """Any value of `null` or of `boolean`."""

    type: str


@frozen
class Number:
    """A number; bounds are included, and None where there is none."""

    type: str
    low: int | float | None = None
    high: int | float | None = None


@frozen
class String:
    """A string; any if there is no expression."""

    expression: Expression | None = None


@frozen
class Array:
    """An array: the items of its beginning, those after them (None: there are none), and how many there are."""

    prefix: tuple[Conjunction, ...]
    items: Conjunction | None
    least: int = 0
    most: int | None = None


@frozen
class Object:
    """An object of named properties and no others, in the order in which they are written."""

    properties: tuple[tuple[str, Conjunction], ...]
    required: frozenset[str]
    least: int = 0
    most: int | None = None


@frozen
class Map:
    """An object of any properties whose names an expression matches, or of any names at all."""

    names: Expression | None
    values: Conjunction
    least: int = 0
    most: int | None = None


Shape: TypeAlias = AnyValue | Values | Constant | Number | String | Array | Object | Map
