"""The bounds of numbers, narrowed to what the grammar backend keeps: included bounds of at most six decimals.

A number in an answer is read as a float by most programs. Where two decimal texts are one float, an excluded bound is
left by more than that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from protocol.schemas.documents import SchemaNode
from protocol.schemas.shapes import Number, Values

INTEGER_MAX = 10**18  # the backend computes with 64 bits
FRACTION_MAX = 10**9  # up to here, numbers of six decimals are different floats
FLOAT_MAX = 10**15
LISTED_MAX = 512  # multiples that are listed one by one
_MICRO = Decimal("0.000001")
_EXACT = Context(prec=400)


def narrowed_numbers(nodes: Sequence[SchemaNode], *, integer: bool) -> Number | Values | None:
    """Return the numbers that validate under every node, None if there are none; raises `Unenforceable`."""
    steps = [node for node in nodes if node.get("multipleOf") is not None]
    whole = integer or any(_number(node, "multipleOf") % 1 == 0 for node in steps)
    low, high = (_bound(nodes, side, whole=whole) for side in ("minimum", "maximum"))
    if low is not None and high is not None and low > high:
        return None
    if any(_number(node, "multipleOf") != 1 for node in steps):
        return _multiples(steps, low, high, whole=whole)
    return Number("integer" if whole else "number", _plain(low), _plain(high))


def only_number(value: object) -> Number | None:
    """Return the shape of one fraction alone, None if its decimals are too many or it is something else."""
    if not isinstance(value, float) or abs(value) > FRACTION_MAX:
        return None
    exact = Decimal(repr(value))
    return Number("number", value, value) if exact == exact.quantize(_MICRO) else None


def _number(node: SchemaNode, keyword: str) -> Decimal:
    value = node.get(keyword)
    assert isinstance(value, (int, float))
    return Decimal(repr(value))


def _bound(nodes: Sequence[SchemaNode], side: str, *, whole: bool) -> Decimal | None:
    lower = side == "minimum"
    bound: Decimal | None = None
    for node in nodes:
        for keyword in (side, f"exclusive{side.capitalize()}"):
            if node.get(keyword) is None:
                continue
            own = _inclusive(node, keyword, lower=lower, whole=whole)
            bound = own if bound is None else max(bound, own) if lower else min(bound, own)
    return bound


def _inclusive(node: SchemaNode, keyword: str, *, lower: bool, whole: bool) -> Decimal:
    """Return the first number within a bound that the backend can write."""
    value = _number(node, keyword)
    limit = INTEGER_MAX if whole else FLOAT_MAX
    if abs(value) > limit:
        if lower == (value < 0):
            return Decimal(-limit if lower else limit)
        node.refuse(keyword, f"numbers beyond {limit:,} cannot be bounded; leave it out, or choose a smaller unit")
    step = Decimal(1) if whole or abs(value) > FRACTION_MAX else _MICRO
    first = value.quantize(step, ROUND_CEILING if lower else ROUND_FLOOR, _EXACT)
    if first == value and keyword.startswith("exclusive"):
        first = first + step if lower else first - step
    return first


def _multiples(steps: Sequence[SchemaNode], low: Decimal | None, high: Decimal | None, *, whole: bool) -> Values | None:
    sizes = [_number(node, "multipleOf") for node in steps]
    if not whole or any(size % 1 for size in sizes):
        steps[0].refuse("multipleOf", "only multiples of whole numbers can be listed; list the numbers by enum")
    size = math.lcm(*(int(size) for size in sizes))
    if low is None or high is None or (high - low) / size > LISTED_MAX:
        reason = f"it needs a minimum and a maximum with at most {LISTED_MAX} multiples in between"
        steps[0].refuse("multipleOf", f"{reason}, or an enum of the numbers")
    first = math.ceil(Fraction(low) / size) * size
    return Values(tuple(map(json.dumps, range(first, int(high) + 1, size)))) if first <= high else None


def _plain(bound: Decimal | None) -> int | float | None:
    return None if bound is None else int(bound) if bound == bound.to_integral_value() else float(bound)
