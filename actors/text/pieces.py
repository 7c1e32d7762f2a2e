"""Text with log probabilities in small pieces, so that no turn of the event loop serialises a thousand tokens.

A stop string that is almost complete may hold a thousand tokens back, and so may a run of special tokens, which add no
text. Each of those tokens may have twenty log probabilities, and all choices may release theirs in one engine step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import define, field

from protocol.dialects.logprobs import split_text
from protocol.messages.text import Text

SCORED_A_PIECE = 4  # tokens with log probabilities
PIECES_A_STEP = 2  # more than arrive in a step, so that those that wait become fewer


@define(eq=False)
class TextPieces:
    """The text of one choice in order, in pieces of a few log probabilities each."""

    _waiting: deque[Iterator[Text]] = field(factory=deque)

    def take(self, text: Text | None) -> None:
        """Add the next text, if there is one."""
        if text is not None:
            short = len(text.logprobs) <= SCORED_A_PIECE
            self._waiting.append(iter((text,)) if short else split_text(text, SCORED_A_PIECE))

    def give(self, pieces_max: int) -> list[Text]:
        """Return the next pieces, at most `pieces_max`."""
        out: list[Text] = []
        while self._waiting and len(out) < pieces_max:
            if (piece := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
            else:
                out.append(piece)
        return out
