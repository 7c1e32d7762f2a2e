"""Bounds on what one operation of a chat template builds, since a client's variable may be its factor or its width.

The size is known before anything is built, and counts as steps, so that many operations are bounded, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TypeAlias, cast

from jinja2.sandbox import SandboxedFormatter

from actors.text.template_steps import LimitReached, take

Filter: TypeAlias = Callable[..., object]  # type: ignore[explicit-any]  # for mypy the `...` is one

BUILT_MAX = 1_000_000  # characters or items
INDENT_MAX = 32  # characters, which are put before each of many lines
BITS_MAX = 65_536
STEP_CHARACTERS = 16  # that are built in the time of a step, or less

OPERATORS = frozenset({"*", "**", "%"})
"""The operators whose result may be much longer than what they are given."""

PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
"""The methods of texts that take a width."""

_LONG_NUMBER = re.compile(r"\d{6,}")
_STARRED = re.compile(r"%[^a-zA-Z%]*\*")


def check_operation(operator: str, left: object, right: object) -> None:
    """Raise `LimitReached` if an operation would build too much; `operator` is one of `OPERATORS`."""
    if operator == "%":
        if isinstance(left, str):
            _check_format(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > BITS_MAX:
            raise LimitReached(f"it computes a number of more than {BITS_MAX} bits")
    elif operator == "*":
        sequence, factor = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, Sequence) and isinstance(factor, int):
            _check_size(len(sequence) * factor)


def check_call(function: object, arguments: Sequence[object]) -> None:
    """Raise `LimitReached` if a method of a text would build too much."""
    if isinstance(text := getattr(function, "__self__", None), str) and arguments:
        name = getattr(function, "__name__", "")
        if name in PADDING:
            _check_size(_number(arguments[0]))
        elif name == "expandtabs":
            _check_size(text.count("\t") * _number(arguments[0]))


def bounded(filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Return those filters that take widths or counts, with bounds on these."""
    bounds = {"indent": INDENT_MAX, "tojson": INDENT_MAX, "center": BUILT_MAX, "slice": BUILT_MAX, "batch": BUILT_MAX}
    found = {name: _bounded(filters[name], most) for name, most in bounds.items()}
    formatted = filters["format"]

    @wraps(formatted)
    def checked_format(value: object, *args: object, **kwargs: object) -> object:
        _check_format(str(value), args)
        return formatted(value, *args, **kwargs)

    return {**found, "format": checked_format}


class BoundedFormatter(SandboxedFormatter):
    """A formatter of `{}` in a text, with bounds on widths."""

    def format_field(self, value: object, format_spec: str) -> str:
        """Return a formatted value."""
        _check_numbers(format_spec)
        return cast("str", super().format_field(value, format_spec))


def _bounded(function: Filter, most: int) -> Filter:
    @wraps(function)
    def checked(*args: object, **kwargs: object) -> object:
        for argument in (*args[1:], *kwargs.values()):
            # The indentation may be a text itself.
            size = len(argument) if isinstance(argument, str) and most == INDENT_MAX else _number(argument)
            if size > most:
                raise LimitReached(f"it asks `{function.__name__.removeprefix('do_')}` for more than {most}")
        return function(*args, **kwargs)

    return checked


def _check_format(pattern: str, arguments: object) -> None:
    _check_numbers(pattern)
    if _STARRED.search(pattern):
        for argument in arguments if isinstance(arguments, tuple) else (arguments,):
            _check_size(_number(argument))


def _check_numbers(pattern: str) -> None:
    for number in cast("list[str]", _LONG_NUMBER.findall(pattern)):
        _check_size(BUILT_MAX + 1 if len(number) > len(str(BUILT_MAX)) else int(number))


def _number(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def _check_size(size: int) -> None:
    if size > BUILT_MAX:
        raise LimitReached(f"it builds more than {BUILT_MAX} characters or items at once")
    take(max(size, 0) // STEP_CHARACTERS)
