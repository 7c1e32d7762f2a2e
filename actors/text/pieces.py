"""Text that was held back with its log probabilities, told a few tokens at a time.

A stop string that is almost complete holds a thousand tokens back, and special tokens say nothing for as long as they
come; each may have twenty log probabilities, and every choice may let go of its own in the same engine step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from attrs import define, field

from protocol.dialects.logprobs import parted
from protocol.text_messages import Text

SCORED_A_PIECE = 4  # tokens with log probabilities
PIECES_A_STEP = 2  # more than come, so that those that wait become fewer


@define(eq=False)
class TextPieces:
    """What is read of one choice, in the order in which it came, and in pieces of a few log probabilities each."""

    _waiting: deque[Iterator[Text]] = field(factory=deque)

    def take(self, text: Text | None) -> None:
        """Take the next text, if there is one."""
        if text is not None:
            short = len(text.logprobs) <= SCORED_A_PIECE
            self._waiting.append(iter((text,)) if short else parted(text, SCORED_A_PIECE))

    def give(self, most: int) -> list[Text]:
        """Return the next pieces, at most so many."""
        out: list[Text] = []
        while self._waiting and len(out) < most:
            if (piece := next(self._waiting[0], None)) is None:
                self._waiting.popleft()
            else:
                out.append(piece)
        return out
