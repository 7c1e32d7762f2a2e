"""The law of schemas: what an engine's grammar backend keeps, decided before an engine sees a schema.

A grammar backend compiles many schemas that it does not keep: it ignores the siblings of `$ref`, look-aheads and
more. No schema of a client reaches it. A schema is read as JSON Schema (2020-12), and written anew in
the few keywords that the backend keeps. What cannot be written is refused by place and keyword. Every answer
under the new schema validates under the client's. Not every value that validates is a possible answer: a schema may be
narrowed, and is never widened.

The steps: `documents` (places and references), `alternatives` (references, `allOf` and unions), `narrowing` (the shapes
of one alternative), `exclusion` (`oneOf`), `graph` (what is possible at all), `engine_schema` (the text).
"""

from __future__ import annotations

from protocol.schemas.documents import Document
from protocol.schemas.engine_schema import EngineSchema
from protocol.schemas.expressions import BadExpression
from protocol.schemas.graph import Graph
from protocol.schemas.patterns import text_pattern
from protocol.schemas.refusals import Unenforceable

__all__ = ["Unenforceable", "enforceable", "enforceable_pattern"]


def enforceable(text: str) -> str:
    """Return the schema that an engine gets for a client's; raises `Unenforceable` if there is none.

    The result is for the grammar backend alone: it is no schema to validate answers by.
    """
    document = Document.parse(text)
    graph = Graph(document)
    graph.fill()
    return EngineSchema(graph).text(document.root)


def enforceable_pattern(pattern: str) -> str:
    """Return the regular expression that an engine gets for a client's; raises `Unenforceable` if there is none."""
    try:
        return text_pattern(pattern)
    except BadExpression as error:
        raise Unenforceable("#", "regex", str(error)) from None
