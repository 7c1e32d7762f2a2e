"""Each format whose calls a grammar can demand has its calls in a shape that grammars of answers are made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.text.formats.answer import WholeFormat
from actors.text.formats.held_format import HeldArguments, HeldFormat, HeldText
from actors.text.formats.table import TOOLS

API = Path(__file__).parents[4] / "docs" / "api.md"
HELD = {name: each for name, each in TOOLS.items() if isinstance(each, HeldFormat)}


@pytest.mark.parametrize("name", HELD)
def test_a_call_begins_and_ends_with_a_text(name: str) -> None:
    """So a grammar may begin within the first text, and an answer ends behind the last."""
    call = HELD[name].call('a "quoted" name', HeldArguments({"type": "object"}))
    assert call["type"] == "tag"
    assert isinstance(call["begin"], str)
    frame = HELD[name].frame
    bare = getattr(HELD[name], "bare", "")
    assert (frame.begin or call["begin"]).startswith(tuple(bare) or frame.trigger)


def test_the_page_for_clients_lists_the_formats_that_a_grammar_can_hold() -> None:
    sentence = API.read_text().partition("A grammar can hold the calls of every format: ")[2].partition("\n\n")[0]
    assert re.findall("`(.+?)`", sentence) == sorted(HELD)
    assert HELD.keys() == TOOLS.keys()


@pytest.mark.parametrize("name", [name for name, each in TOOLS.items() if isinstance(each, WholeFormat)])
def test_the_text_of_every_whole_format_can_be_held(name: str) -> None:
    assert isinstance(TOOLS[name], HeldText)
