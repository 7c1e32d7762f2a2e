"""Answers read by the stage of a format: what a test compares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actors.text.formats.answer import Expected
from actors.text.formats.stage import CallPiece, Piece, ReasoningPiece, Stage
from actors.text.formats.table import AnswerFormat, make_stage
from actors.text.formats.tool_table import ToolTable

TOOLS = ToolTable(
    {
        "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
        "f_2": {"type": "object", "properties": {}},
        "g": {},
    }
)

Part = tuple[str, ...]
"""`("text", TEXT)`, `("reasoning", TEXT)`, or `("call", NAME, ARGUMENTS)`."""


def joined(pieces: Iterable[Piece]) -> list[Part]:
    """Return pieces as parts: those of one kind and those of one call are joined."""
    parts = list[Part]()
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name:
                parts.append(("call", piece.name, piece.arguments))
            else:
                parts[-1] = (*parts[-1][:2], f"{parts[-1][2]}{piece.arguments}")
            continue
        kind = "reasoning" if isinstance(piece, ReasoningPiece) else "text"
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, f"{parts[-1][1]}{piece.text}")
        else:
            parts.append((kind, piece.text))
    return parts


def parts_of(stage: Stage, texts: Iterable[str], *, cut: bool = False) -> list[Part]:
    """Return what a stage makes of texts, the last of which ends the answer."""
    pieces = [piece for text in texts for piece in stage.feed(text)]
    return joined([*pieces, *stage.end(cut=cut)])


def read(
    text: str,
    tools: str | None = None,
    reasoning: str | None = None,
    *,
    offered: ToolTable = TOOLS,
    thinking: bool = False,
    cut: bool = False,
) -> Sequence[Part]:
    """Return the parts of an answer; it comes whole and by single characters, which has to give the same."""
    answers, offer = AnswerFormat(tools, reasoning), Expected(offered, thinking)
    whole = parts_of(make_stage(answers, offer), [text], cut=cut)
    assert parts_of(make_stage(answers, offer), text, cut=cut) == whole
    return whole
