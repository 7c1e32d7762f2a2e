"""Chat templates, in transformers' dialect of Jinja.

A template is a program by the authors of a model, and a client's conversation is its input. It runs in a thread, which
cannot be stopped from outside, so its steps are counted and limited. A step is an attribute, an item or a call through
the sandbox, or an iteration over the conversation or a range.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from typing import NoReturn, SupportsIndex, TypeAlias, TypeVar, overload

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from attrs import define

from protocol.errors import StartFailed

T = TypeVar("T")
_Slice: TypeAlias = "slice[SupportsIndex | None, SupportsIndex | None, SupportsIndex | None]"


# The most steps of one rendering: some seconds. Templates take about ten a turn, and a body holds 11,000 turns.
STEPS_MAX = 1_000_000

RENDERED_CHARACTERS_MAX = 32 * 1024 * 1024


class LimitReached(jinja2.TemplateError):
    """A rendering exceeds a limit; the message has the limit."""


class _Steps:
    """The steps of one rendering."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, steps: int) -> None:
        self._taken += steps
        if self._taken > STEPS_MAX:
            raise LimitReached(f"it takes more than {STEPS_MAX} steps")


# The steps of the rendering in this thread or task.
_steps: ContextVar[_Steps | None] = ContextVar("_steps", default=None)


def _take(steps: int) -> None:
    if (counter := _steps.get()) is not None:
        counter.take(steps)


class _Counted(list[T]):
    """A list whose iterations count as steps."""

    def __iter__(self) -> Iterator[T]:
        _take(len(self))
        return super().__iter__()

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, index: _Slice) -> list[T]: ...

    def __getitem__(self, index: SupportsIndex | _Slice) -> T | list[T]:
        if isinstance(index, slice):
            return _Counted(super().__getitem__(index))
        return super().__getitem__(index)


class _CountedKeys(dict[str, object]):
    """An object whose iterations count as steps."""

    def __iter__(self) -> Iterator[str]:
        _take(len(self))
        return super().__iter__()


def counted(value: object) -> object:
    """Return a value of JSON as a template gets it: iterations over its lists and objects count as steps."""
    if isinstance(value, Mapping):
        return _CountedKeys({key: counted(inner) for key, inner in value.items()})
    return _Counted(map(counted, value)) if isinstance(value, list) else value


@define(eq=False)
class LastRead:
    """The index of the message that a template has read last."""

    place: int | None = None


class _Watched(dict[str, object]):
    """A message that notes when a template reads it."""

    def __init__(self, message: Mapping[str, object], place: int, last: LastRead) -> None:
        super().__init__(message)
        self._place = place
        self._last = last

    def __getitem__(self, key: str) -> object:
        self._last.place = self._place
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """Return a value of the message."""
        self._last.place = self._place
        return super().get(key, default)


def watched(messages: Sequence[Mapping[str, object]]) -> tuple[list[Mapping[str, object]], LastRead]:
    """Return the same messages, and what knows which of them a template has read last."""
    last = LastRead()
    return [_Watched(message, place, last) for place, message in enumerate(messages)], last


# Clients read the errors of Jinja and Python, and these name the class of an object.
for _class, _name in ((_Counted, "list"), (_CountedKeys, "dict"), (_Watched, "dict")):
    _class.__name__ = _class.__qualname__ = _name
    _class.__module__ = "builtins"


_LONG = (range, KeysView, ValuesView, ItemsView)  # what a template may iterate over once it has called for it


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with a count of steps; a template can compute text, and nothing else."""

    def getattr(self, obj: object, attribute: str) -> object:
        _take(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> object:
        _take(1)
        return super().getitem(obj, argument)

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: object, **kwargs: object) -> object:
        result = super().call(context, obj, *args, **kwargs)
        _take(1 + (len(result) if isinstance(result, _LONG) else 0))
        return result


def render_conversation(
    template: jinja2.Template, messages: Iterable[Mapping[str, object]], variables: Mapping[str, object]
) -> str:
    """Return the rendered conversation; raises the template's own error, or `TemplateError` beyond a limit."""
    _steps.set(_Steps())
    return "".join(_within_bounds(template.generate(messages=_Counted(messages), **variables)))


def _within_bounds(pieces: Iterator[str]) -> Iterator[str]:
    characters = 0
    for piece in pieces:
        characters += len(piece)
        if characters > RENDERED_CHARACTERS_MAX:
            raise LimitReached(f"it makes more than {RENDERED_CHARACTERS_MAX} characters")
        yield piece


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, a mark around text for training, without a meaning here."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own shape

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, strftime: Callable[[str], str]) -> jinja2.Template:
    """Return a template ready to render, with `strftime_now`; raises `StartFailed` if it cannot be compiled."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime
    environment.filters["tojson"] = tojson
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise StartFailed(f"the chat template cannot be read: {error}") from error


# Named as templates know them, since errors about their arguments have their names.
def raise_exception(sentence: str) -> NoReturn:
    """Refuse a conversation with a sentence of the template's own."""
    raise jinja2.TemplateError(sentence)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
