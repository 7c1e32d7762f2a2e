"""The log probabilities of a prompt's tokens in a simulated engine, made as its pieces are computed.

The tokens before a place decide which tokens are likely there, so that prompts with the same beginning have the same
numbers in it. A piece may have thousands of tokens, each with twenty likeliest ones. So a row is a few operations: its
ids follow each other, and its values are one of `LEVELS` rows made once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from math import log, log1p

from attrs import define, field

from protocol.messages.generation import PromptScores
from protocol.tensors import Dtype, Tensor

LEVELS = 64
RANK_MAX = 40  # all further tokens are as unlikely as this one
_MULTIPLIER, _MASK = 6364136223846793005, 2**64 - 1  # of a linear congruential generator


@define(eq=False)
class PromptScorer:
    """The scores of one prompt so far, with `likeliest` tokens in each place."""

    vocabulary_size: int
    likeliest: int
    seed: int = 0
    tokens: int = 0  # of the prompt so far
    _state: int = field(init=False, default=0)  # of the tokens so far
    _logprobs: array[float] = field(init=False, factory=lambda: array("f"))
    _top_ids: array[int] = field(init=False, factory=lambda: array("i"))
    _top_logprobs: array[float] = field(init=False, factory=lambda: array("f"))

    def __attrs_post_init__(self) -> None:
        self.likeliest = min(self.likeliest, self.vocabulary_size)

    def add(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the prompt."""
        size, likeliest = self.vocabulary_size, self.likeliest
        state, rows = self._state if self.tokens else self.seed & _MASK, _rows()
        for token in tokens:
            if self.tokens:
                row, first = rows[state >> 58], (state >> 16 & 0xFFFFFFFF) % size
                self._logprobs.append(row[min((token - first) % size, RANK_MAX)])
                self._top_ids.extend(range(first, min(first + likeliest, size)))
                self._top_ids.extend(range(first + likeliest - size))
                self._top_logprobs.extend(row[:likeliest])
                self._top_logprobs.extend(row[RANK_MAX:] * (likeliest - len(row)))
            state = (state + 2 * token + 1) * _MULTIPLIER & _MASK
            self.tokens += 1
        self._state = state

    def scores(self) -> PromptScores:
        """Return the scores of the tokens behind the first."""
        rows, likeliest = len(self._logprobs), self.likeliest
        return PromptScores(
            Tensor(Dtype.FLOAT32, (rows,), memoryview(self._logprobs.tobytes())),
            Tensor(Dtype.INT32, (rows, likeliest), memoryview(self._top_ids.tobytes())),
            Tensor(Dtype.FLOAT32, (rows, likeliest), memoryview(self._top_logprobs.tobytes())),
        )


@lru_cache(maxsize=1)
def _rows() -> tuple[array[float], ...]:
    """Return the log probabilities by rank: the likeliest has half or more, each further one half of the rest."""
    rows = []
    for level in range(LEVELS):
        likeliest = 0.5 + 0.499 * level / LEVELS
        further = (log1p(-likeliest) - rank * log(2) for rank in range(1, RANK_MAX + 1))
        rows.append(array("f", [log(likeliest), *further]))
    return tuple(rows)
