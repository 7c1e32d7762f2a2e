"""What a text becomes in a format: whole, and by single characters, which has to give the same."""

from __future__ import annotations

from collections.abc import Mapping

from actors.text.formats.answer import Expected
from actors.text.formats.table import AnswerFormat
from actors.text.formats.tool_table import ToolTable
from tests.actors.text.formats.mixtures import Mixture
from tests.actors.text.formats.test_stage_law import result

WRITE = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
SET = {"properties": {"n": {"type": "integer"}, "x": {"type": "number"}, "on": {"type": "boolean"}, "any": {}}}
NEST = {"properties": {"items": {"type": "array"}, "note": {"type": ["string", "null"]}}}
TOOLS: Mapping[str, Mapping[str, object]] = {"write": WRITE, "set": SET, "nest": NEST, "now": {}, "now.utc": {}}


def read(answers: AnswerFormat, text: str, *, thinking: bool = False, cut: bool = False) -> list[tuple[object, ...]]:
    """Return the pieces of a text, calls as `(name, arguments)`, others as `(kind, text)`."""
    offer, mixture = Expected(ToolTable(TOOLS), thinking), Mixture(answers, ())
    whole = result(mixture, offer, [text], cut=cut)
    assert result(mixture, offer, [*text], cut=cut) == whole
    return [piece[2:] if piece[0] == "call" else piece for piece in whole]
