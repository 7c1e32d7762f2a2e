"""First parts of a long text, tokenised to refuse the text if it certainly has too many tokens.

So a refusal costs about twice as much as a prompt that fits, however long the text is.
"""

from __future__ import annotations

from collections.abc import Iterator

# The length of the first part. Text has 3 to 5 characters a token, code up to 6: what fits is shorter, and so is
# tokenised once, however near it comes to the limit. A refusal costs about twice as much as a prompt that fits.
FIRST_CHARACTERS_A_TOKEN = 8
# The factor from the length of one part to that of the next.
GROWTH = 4
# The most tokens that a part may have more than the whole text: at the cut, and around a text.
# The longest words in any vocabulary have far fewer.
SEAM_TOKENS = 1_024


class TooManyTokens(Exception):
    """A text certainly has more tokens than it may have; the message is their number, as far as it is known."""


def first_parts(characters: int, tokens_max: int) -> Iterator[int]:
    """Yield the lengths of the parts to count before the whole text is tokenised; none for a text that may fit."""
    part = FIRST_CHARACTERS_A_TOKEN * max(tokens_max, SEAM_TOKENS)
    while part < characters:
        yield part
        part *= GROWTH
