"""Log probabilities as TensorRT-LLM gives them, in the form of the project's replies.

For each token it gives a dictionary of the likeliest tokens, with the drawn one behind them if it is none of them, or
the bare number of the drawn token alone. A number that is not there is never made up: such an answer fails.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from protocol.errors import InternalError
from protocol.messages.generation import Logprob, PromptScores
from protocol.tensors import Dtype, Tensor
from protocol.token_ids import TokenIds


class Ranked(Protocol):
    """A log probability of TensorRT-LLM; `rank` is 1 for the likeliest token of the vocabulary, None if unknown."""

    @property
    def logprob(self) -> float:
        """The natural logarithm."""

    @property
    def rank(self) -> int | None:
        """The place in the order of all tokens."""


Place: TypeAlias = Mapping[int, Ranked] | float
"""What is known of one token's place: its likeliest tokens by id, or the drawn one's number alone."""


def read(found: Sequence[Place], ids: Sequence[int], top: int) -> tuple[Logprob, ...]:
    """Return the log probabilities of tokens, with the `top` likeliest in each place; what is beyond them is left out.

    Raises `InternalError` if one is missing. A place with a bare number has no likeliest tokens.
    """
    if len(found) < len(ids):
        raise InternalError(f"TensorRT-LLM gave {len(found)} log probabilities for {len(ids)} tokens")
    return tuple(_read(place, token, top) for place, token in zip(found, ids, strict=False))


def read_prompt(found: Sequence[Place], tokens: TokenIds, rows: int, top: int) -> PromptScores:
    """Return the scores of a prompt's `rows` tokens behind its first one.

    TensorRT-LLM's first place is that of the second token. Raises `InternalError` if a number is missing.
    """
    scored = read(found, tokens[1 : rows + 1], top)
    short = next((place for place, each in enumerate(scored) if len(each.top) < top), None)
    if short is not None:
        raise InternalError(f"TensorRT-LLM gave fewer than {top} likely tokens in place {short} of a prompt")
    ids = array("i", (token for each in scored for token, _ in each.top))
    logprobs = array("f", (logprob for each in scored for _, logprob in each.top))
    own = array("f", (each.logprob for each in scored))
    return PromptScores(
        _tensor(Dtype.FLOAT32, own, rows),
        _tensor(Dtype.INT32, ids, rows, top),
        _tensor(Dtype.FLOAT32, logprobs, rows, top),
    )


def _read(place: Place, token: int, top: int) -> Logprob:
    if isinstance(place, float):
        return Logprob(place)
    own = place.get(token)
    if own is None:
        raise InternalError(f"TensorRT-LLM gave no log probability of the drawn token {token}")
    if not top:
        return Logprob(own.logprob)
    likeliest = sorted(place.items(), key=_order)[:top]
    return Logprob(own.logprob, tuple((each, ranked.logprob) for each, ranked in likeliest))


def _order(each: tuple[int, Ranked]) -> tuple[float, int]:
    """Return the key of a token in the order of its place: the likeliest first, of equals the one of the lower rank."""
    _, ranked = each
    return -ranked.logprob, ranked.rank or 0


def _tensor(dtype: Dtype, numbers: array[int] | array[float], *shape: int) -> Tensor:
    return Tensor(dtype, shape, memoryview(numbers.tobytes()))
