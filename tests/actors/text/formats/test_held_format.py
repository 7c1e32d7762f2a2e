"""Each format whose calls a grammar can demand has its calls in a shape that grammars of answers are made of."""

from __future__ import annotations

import pytest

from actors.text.formats.held_format import HeldArguments, HeldFormat
from actors.text.formats.table import TOOLS

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
