"""The lengths of the texts of a regular expression, and the expression narrowed to given lengths."""

from __future__ import annotations

from math import isqrt

from protocol.schemas.expressions import EMPTY, NOTHING, Alternation, Edge, Expression, Repeat, Sequence


def simplified(tree: Expression) -> Expression:
    """Return an expression without its parts that match nothing; `NOTHING` if no part is left."""
    match tree:
        case Sequence(parts):
            kept = tuple(part for part in map(simplified, parts) if part != EMPTY)
            return NOTHING if NOTHING in kept else kept[0] if len(kept) == 1 else Sequence(kept)
        case Alternation(parts):
            return _choice([part for part in map(simplified, parts) if part != NOTHING])
        case Repeat(part, least, most):
            inner = simplified(part)
            if inner in {NOTHING, EMPTY} or most == 0:
                return NOTHING if inner == NOTHING and least else EMPTY
            return inner if least == most == 1 else Repeat(inner, least, most)
        case _:
            return tree


def _choice(parts: list[Expression]) -> Expression:
    kept = tuple(part for part in dict.fromkeys(parts) if part != EMPTY)
    if not kept:
        return EMPTY if parts else NOTHING
    some = kept[0] if len(kept) == 1 else Alternation(kept)
    return some if EMPTY not in parts else Repeat(some, 0, 1)


def lengths(tree: Expression) -> tuple[int, int | None]:
    """Return the least and the greatest number of characters; None if there is no greatest one."""
    match tree:
        case Sequence(parts):
            return _sum([lengths(part) for part in parts])
        case Alternation(parts):
            bounds = [lengths(part) for part in parts]
            highs = [high for _, high in bounds]
            return min(low for low, _ in bounds), None if None in highs else max(high or 0 for high in highs)
        case Repeat(part, least, most):
            low, high = lengths(part)
            return low * least, 0 if high == 0 else None if high is None or most is None else high * most
        case Edge():
            return 0, 0
        case _:
            return 1, 1


def within(tree: Expression, least: int, most: int | None) -> Expression:
    """Return an expression for texts of `least` to `most` characters that the expression matches, `NOTHING` if none.

    Exact for alternatives, and for one count of parts of one length; other parts of variable length share what is left,
    each a part of it, so that some texts of these lengths are left out.
    """
    low, high = lengths(tree)
    if low >= least and (most is None or (high is not None and high <= most)):
        return tree
    if (most is not None and low > most) or (high is not None and high < least):
        return NOTHING
    match tree:
        case Sequence(parts):
            return _sequence_within(parts, least, most)
        case Alternation(parts):
            return simplified(Alternation(tuple(within(part, least, most) for part in parts)))
        case Repeat(part, fewest, greatest):
            return _repeat_within(part, fewest, greatest, least, most)
        case _:
            return NOTHING


def _sum(bounds: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    highs = [high for _, high in bounds]
    return sum(low for low, _ in bounds), None if None in highs else sum(high or 0 for high in highs)


def _sequence_within(parts: tuple[Expression, ...], least: int, most: int | None) -> Expression:
    bounds = [lengths(part) for part in parts]
    variable = [index for index, (low, high) in enumerate(bounds) if low != high]
    missing = least - sum(low for low, _ in bounds)
    free = None if most is None else most - sum(low for low, _ in bounds)
    narrowed = list(parts)
    for number, index in enumerate(variable):
        low, high = bounds[index]
        spare = None if high is None else high - low
        needed = min(max(0, missing), missing if spare is None else spare)
        share = None if free is None else max(needed, (free - max(0, missing - needed)) // (len(variable) - number))
        narrowed[index] = within(parts[index], low + needed, None if share is None else low + share)
        got = lengths(narrowed[index])
        missing -= got[0] - low
        if free is not None:
            free -= (got[1] or 0) - low
    result = simplified(Sequence(tuple(narrowed)))
    return result if _fits(result, least, most) else NOTHING


def _repeat_within(part: Expression, fewest: int, greatest: int | None, least: int, most: int | None) -> Expression:
    low, high = lengths(part)
    if high == 0:
        return NOTHING
    if low == high:
        fewest = max(fewest, -(-least // low))
        times = greatest if most is None else most // low if greatest is None else min(greatest, most // low)
        return NOTHING if times is not None and times < fewest else Repeat(part, fewest, times)
    if low:
        fewest = max(fewest, -(-least // low))
    elif least:
        part, low = within(part, 1, None), 1
        fewest = max(fewest, least)
    times = greatest
    if most is not None:
        wanted = max(fewest, 1, isqrt(most // max(1, low)))
        times = wanted if greatest is None else min(greatest, wanted)
        if times:
            part = within(part, low, most // times)
    if times is not None and times < fewest:
        return NOTHING
    result = simplified(Repeat(part, fewest, times))
    return result if _fits(result, least, most) else NOTHING


def _fits(tree: Expression, least: int, most: int | None) -> bool:
    low, high = lengths(tree)
    return tree != NOTHING and low >= least and (most is None or (high is not None and high <= most))
