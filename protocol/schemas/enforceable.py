"""The law of schemas: what an engine's grammar backend keeps, decided before an engine sees a schema.

A grammar backend compiles many schemas that it does not keep: it ignores the siblings of `$ref`, look-aheads and
more. A schema is therefore refused, with its place and keyword, unless every answer to it is certain to validate (JSON
Schema 2020-12). A schema may be narrowed, so that fewer answers are possible than would validate; it is never widened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from protocol.schemas.keywords import LIST_KEYWORDS, MAP_KEYWORDS, REFUSED, SCHEMA_KEYWORDS
from protocol.schemas.patterns import refused_construct
from protocol.schemas.refusals import Unenforceable, pointer_below

__all__ = ["Unenforceable", "enforceable", "enforceable_pattern"]


def enforceable(text: str) -> str:
    """Return the schema that an engine gets for a client's schema; raises `Unenforceable` if there is none."""
    waiting: list[tuple[str, object]] = [("#", json.loads(text))]
    while waiting:
        pointer, schema = waiting.pop()
        if isinstance(schema, dict):
            _check(pointer, schema)
            waiting += _below(pointer, schema)
    return text


def enforceable_pattern(pattern: str) -> str:
    """Return the regular expression that an engine gets for a client's; raises `Unenforceable` if there is none."""
    if (reason := refused_construct(pattern)) is not None:
        raise Unenforceable("#", "regex", reason)
    return pattern


def _check(pointer: str, schema: dict[str, object]) -> None:
    for keyword, reason in REFUSED.items():
        if schema.get(keyword, False) not in (None, False):
            raise Unenforceable(pointer, keyword, reason)
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and (mistake := refused_construct(pattern)) is not None:
        raise Unenforceable(pointer, "pattern", mistake)


def _below(pointer: str, schema: dict[str, object]) -> Iterator[tuple[str, object]]:
    for keyword in SCHEMA_KEYWORDS:
        yield pointer_below(pointer, keyword), schema.get(keyword)
    for keyword in LIST_KEYWORDS:
        if isinstance(branches := schema.get(keyword), list):
            yield from ((pointer_below(pointer, keyword, index), branch) for index, branch in enumerate(branches))
    for keyword in MAP_KEYWORDS:
        if isinstance(named := schema.get(keyword), dict):
            yield from ((pointer_below(pointer, keyword, name), branch) for name, branch in named.items())
