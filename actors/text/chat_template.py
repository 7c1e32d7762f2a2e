"""Chat templates, in transformers' dialect of Jinja.

A template is a program by the authors of a model, and a client's conversation is its input. It runs in a thread, which
cannot be stopped from outside, so its steps are counted and limited (`template_steps.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from attrs import define

from actors.text.template_files import TITLE
from actors.text.template_loops import end_idle_loops
from actors.text.template_sizes import OPERATORS, BoundedFormatter, bounded, check_call, check_operation
from actors.text.template_steps import CountedList, CountedRange, LimitReached, Steps, count_steps, take
from protocol.errors import StartFailed

RENDERED_CHARACTERS_MAX = 32 * 1024 * 1024


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
_Watched.__name__ = _Watched.__qualname__ = "dict"
_Watched.__module__ = "builtins"


_OF_DICTS = frozenset(dir(dict))
_VIEWS = (KeysView, ValuesView, ItemsView)  # what a template may iterate over once it has called for it


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with a count of steps and bounds on sizes; a template can compute text, and nothing else."""

    intercepted_binops = OPERATORS

    def getattr(self, obj: object, attribute: str) -> object:
        take(1)
        # Most attributes are the keys of messages, for which Jinja first raises an `AttributeError`.
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: object, argument: object) -> object:
        take(1)
        return super().getitem(obj, argument)

    def call(self, context: jinja2.runtime.Context, obj: object, /, *args: object, **kwargs: object) -> object:
        check_call(obj, args)
        result = super().call(context, obj, *args, **kwargs)
        take(1 + (len(result) if isinstance(result, _VIEWS) else 0))
        return CountedRange(result) if isinstance(result, range) else result

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:  # type: ignore[explicit-any]
        if super().wrap_str_format(value) is None:
            return None
        pattern, by_map = str(value.__self__), value.__name__ == "format_map"  # type: ignore[attr-defined]

        def format(*args: object, **kwargs: object) -> str:  # noqa: A001  # the name is that of the text's method
            named = cast("Mapping[str, object]", args[0]) if by_map else kwargs
            return BoundedFormatter(self).vformat(pattern, args, named)

        return format


def render_conversation(
    template: jinja2.Template,
    messages: Iterable[Mapping[str, object]],
    variables: Mapping[str, object],
    steps: Steps,
) -> str:
    """Return the rendered conversation; raises the template's own error, or `LimitReached`. `steps` counts."""
    count_steps(steps)
    return "".join(_within_bounds(template.generate(messages=CountedList(messages), **variables)))


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


def compile_template(source: str, strftime: Callable[[str], str], title: str = TITLE) -> jinja2.Template:
    """Return a template ready to render, with `strftime_now`; raises `StartFailed` if it cannot be compiled.

    `title` names it in the sentence.
    """
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _named("strftime_now", strftime)
    environment.filters["tojson"] = tojson
    environment.filters |= bounded(environment.filters)
    try:
        code = environment.compile(end_idle_loops(environment.parse(source)))
        return jinja2.Template.from_code(environment, code, environment.make_globals(None))
    except jinja2.TemplateError as error:
        raise StartFailed(f"{title} cannot be read: {error}") from error


def _named(name: str, function: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function whose errors have the name that templates know it by."""

    def named(text: str) -> str:
        return function(text)

    named.__name__ = named.__qualname__ = name
    return named


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
