"""The leaves of exception groups.

A Trio nursery raises what its tasks raised as an exception group, and nurseries nest, so the same failure may arrive
wrapped once, several times, or not at all. The depth depends on where nurseries were opened, not on the failure. Code
that classifies a failure (an error of one request, a bug, the end of the actor) therefore looks at the leaves alone, by
the functions of this file: code that walks a group by itself easily forgets a level or a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, TypeVar, overload

E = TypeVar("E", bound=BaseException)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, in order and at any depth; for an error that is no group, the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error


@overload
def first_leaf(error: BaseExceptionGroup[E]) -> E: ...
@overload
def first_leaf(error: BaseException) -> BaseException: ...
def first_leaf(error: BaseException) -> BaseException:
    """Return the first leaf, which is the error itself if it is no group."""
    return next(leaves(error))


def first_of(error: BaseException, kind: type[E]) -> E | None:
    """Return the first leaf of a kind, None if there is none."""
    return next((leaf for leaf in leaves(error) if isinstance(leaf, kind)), None)


def raise_part(error: BaseException) -> NoReturn:
    """Raise a part of the group that is being handled, without the group as its context.

    The group refers to the part: such a circle keeps all objects of the tracebacks' frames alive until the garbage
    collector finds it.
    """
    try:
        raise error from None
    finally:
        error.__context__ = None
        del error


def consists_of(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether every leaf is of one of these kinds."""
    return all(isinstance(leaf, kinds) for leaf in leaves(error))
