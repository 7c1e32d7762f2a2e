"""Chat templates, in the dialect of Jinja that models' authors write for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from protocol.errors import StartFailed


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what training learns from, and means nothing here."""

    tags = {"generation"}  # noqa: RUF012  # the shape that jinja2 wants

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return what stands inside as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(source: str, strftime: Callable[[str], str]) -> jinja2.Template:
    """Return a template ready to render, which may ask `strftime` for the time; raises `StartFailed` if it is none."""
    # A model's template is a stranger's program: the sandbox lets it compute text and nothing else.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = strftime
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise StartFailed(f"the chat template cannot be read: {error}") from error


def _refuse(sentence: str) -> NoReturn:
    raise jinja2.TemplateError(sentence)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
