"""The steps of a rendering, which are counted and limited, since a template is a program and a conversation its input.

A step is an attribute, an item or a call through the sandbox, or an iteration over the conversation or a range. Long
loops count as they go, so that one that ends early costs what it did. A long rendering gives its thread up again and
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import SupportsIndex, TypeAlias, TypeVar, overload

import jinja2

from actors.kit.offload import give_turn

T = TypeVar("T")
_Slice: TypeAlias = "slice[SupportsIndex | None, SupportsIndex | None, SupportsIndex | None]"

# The most steps of one rendering, unless the conversation is known to need more. Templates take about ten a turn.
STEPS_MAX = 1_000_000
TURN_STEPS = 100_000  # some tens of milliseconds
FEW = 4  # iterations that are counted before the first
BATCH = 64  # the most iterations that are counted together


class LimitReached(jinja2.TemplateError):
    """A rendering exceeds a limit; the message has the limit."""


class Steps:
    """The steps of one rendering."""

    def __init__(self, steps_max: int = STEPS_MAX) -> None:
        self.taken = 0
        self._max = steps_max
        self._turn_ends = TURN_STEPS

    def take(self, steps: int) -> None:
        """Count steps; raises `LimitReached`, and ends the turn of this thread if it has lasted long."""
        self.taken += steps
        if self.taken > self._turn_ends:
            if self.taken > self._max:
                raise LimitReached(f"it takes more than {self._max} steps")
            self._turn_ends = self.taken + TURN_STEPS
            give_turn()


_steps: ContextVar[Steps | None] = ContextVar("_steps", default=None)  # of the rendering in this thread or task


def count_steps(steps: Steps) -> None:
    """Count what is rendered next in this thread or task."""
    _steps.set(steps)


def take(steps: int) -> None:
    """Count steps of the rendering in this thread or task; raises `LimitReached`."""
    if (counter := _steps.get()) is not None:
        counter.take(steps)


def _counted(part: Callable[[slice[int, int, None]], Sequence[T]]) -> Iterator[T]:
    """Yield the items of a sequence, counted before each part of it; the parts grow, for loops that end early."""
    start, width = 0, 1
    while batch := part(slice(start, start + width)):
        take(len(batch))
        yield from batch
        start += width
        width = min(2 * width, BATCH)


class CountedList(list[T]):
    """A list whose iterations count as steps."""

    def __iter__(self) -> Iterator[T]:
        if len(self) > FEW:
            return _counted(super().__getitem__)
        take(len(self))
        return super().__iter__()

    def __reversed__(self) -> Iterator[T]:
        return iter(self[::-1])

    def __contains__(self, item: object) -> bool:
        take(len(self))
        return super().__contains__(item)

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, index: _Slice) -> list[T]: ...

    def __getitem__(self, index: SupportsIndex | _Slice) -> T | list[T]:
        if isinstance(index, slice):
            part = CountedList(super().__getitem__(index))
            take(len(part) // BATCH)
            return part
        return super().__getitem__(index)


class CountedRange(Sequence[int]):
    """A range whose iterations count as steps."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return _counted(self._numbers.__getitem__)

    def __reversed__(self) -> Iterator[int]:
        return iter(self[::-1])

    def __contains__(self, item: object) -> bool:
        return item in self._numbers

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice[int | None, int | None, int | None]) -> CountedRange: ...

    def __getitem__(self, index: int | slice[int | None, int | None, int | None]) -> int | CountedRange:
        return CountedRange(self._numbers[index]) if isinstance(index, slice) else self._numbers[index]

    def __eq__(self, other: object) -> bool:
        return self._numbers == (other._numbers if isinstance(other, CountedRange) else other)

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        return repr(self._numbers)


class CountedKeys(dict[str, object]):
    """An object whose iterations count as steps."""

    def __iter__(self) -> Iterator[str]:
        take(len(self))
        return super().__iter__()


def counted(value: object) -> object:
    """Return a value of JSON as a template gets it: iterations over its lists and objects count as steps."""
    if isinstance(value, Mapping):
        return CountedKeys({key: counted(inner) for key, inner in value.items()})
    return CountedList(map(counted, value)) if isinstance(value, list) else value


# Clients read the errors of Jinja and Python, and these name the class of an object.
for _class, _name in ((CountedList, "list"), (CountedKeys, "dict"), (CountedRange, "range")):
    _class.__name__ = _class.__qualname__ = _name
    _class.__module__ = "builtins"
