"""A chat template that shows tools, beside the tiny model's own, which shows none."""

from __future__ import annotations

from pathlib import Path

from actors.text.chat_template import compile_template
from actors.text.conversations import ConversationTemplate

FILE = Path(__file__).parents[2] / "examples/hermes.jinja"
SHOWING = ConversationTemplate.learned(compile_template(FILE.read_text(), str), FILE.read_text(), {}, salt="1")
