"""A model with a template that shows tools, whose answers have reasoning and calls in the format `marked`."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from actors.text.formats.table import AnswerFormat
from tests.rig.gateway import TINY, ids
from tests.rig.tools import SHOWING

CALLING = evolve(TINY, template=SHOWING, answers=AnswerFormat("hermes"))

FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "description": "F.", "parameters": None, "strict": False}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "n",
    "description": "N.",
    "tools": [{**FUNCTION, "name": "g"}],
}


def whole_line(line: str) -> str:
    """Return a prompt that a worker answers with the whole of its line."""
    return f"n={len(ids(line))}"
