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
    _top_ids: bytearray = field(init=False, factory=bytearray)
    _top_logprobs: bytearray = field(init=False, factory=bytearray)

    def __attrs_post_init__(self) -> None:
        self.likeliest = min(self.likeliest, self.vocabulary_size)

    def add(self, tokens: Iterable[int]) -> None:
        """Add the next tokens of the prompt."""
        size, state = self.vocabulary_size, self._state if self.tokens else self.seed & _MASK
        ids, width, rows = _ids(size), 4 * self.likeliest, _rows(self.likeliest)
        for token in tokens:
            if self.tokens:
                (row, top), first = rows[state >> 58], (state >> 16 & 0xFFFFFFFF) % size
                self._logprobs.append(row[min((token - first) % size, RANK_MAX)])
                self._top_ids += ids[4 * first : 4 * first + width]
                self._top_logprobs += top
            state = (state + 2 * token + 1) * _MULTIPLIER & _MASK
            self.tokens += 1
        self._state = state

    def scores(self) -> PromptScores:
        """Return the scores of the tokens behind the first."""
        rows, likeliest = len(self._logprobs), self.likeliest
        return PromptScores(
            Tensor(Dtype.FLOAT32, (rows,), memoryview(self._logprobs.tobytes())),
            Tensor(Dtype.INT32, (rows, likeliest), memoryview(bytes(self._top_ids))),
            Tensor(Dtype.FLOAT32, (rows, likeliest), memoryview(bytes(self._top_logprobs))),
        )


@lru_cache(maxsize=4)
def _ids(size: int) -> bytes:
    """Return all ids twice, so that each run of them, from any first one, is in one piece."""
    return array("i", [*range(size), *range(size)]).tobytes()


@lru_cache(maxsize=32)
def _rows(likeliest: int) -> tuple[tuple[array[float], bytes], ...]:
    """Return the log probabilities by rank, and those of the likeliest, for each level.

    The first has half of all probability or more, each further one half of the rest.
    """
    rows = []
    for level in range(LEVELS):
        first = 0.5 + 0.499 * level / LEVELS
        further = [log1p(-first) - rank * log(2) for rank in range(1, RANK_MAX + 1)]
        row = array("f", [log(first), *further])
        top = row[:likeliest] + row[RANK_MAX:] * (likeliest - len(row))
        rows.append((row, top.tobytes()))
    return tuple(rows)
