"""The answers of TensorRT-LLM, which repeat all tokens so far at every step, as replies with the next tokens alone.

Its answer is one growing object, so a reply copies its part. At the end it may also shrink, by the tokens of a
stop string: what has been sent stays sent, and is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attrs import define, field, frozen

from actors.engines.trtllm.log_probabilities import Place, read
from protocol.errors import AskerLeft, InternalError, RequestError
from protocol.messages.generation import FinishReason, Tokens, one_token

CANCELLED = "cancelled"
"""TensorRT-LLM's reason of an answer that was aborted, by its asker or by itself."""

UNFINISHED = (None, "", "not_finished")
"""The reasons of an answer that goes on; the last one is that of a prefill, whose decode goes on."""


class GrowingAnswer(Protocol):
    """One answer of a request, as far as it has come (`CompletionOutput`)."""

    @property
    def token_ids(self) -> Sequence[int] | None:
        """All tokens so far."""

    @property
    def logprobs(self) -> Sequence[Place] | None:
        """Their log probabilities, and sometimes those of tokens to come."""

    @property
    def finish_reason(self) -> str | None:
        """The reason why it ended, None before."""

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token that ended it, None if nothing or the end token did."""


@frozen
class Ending:
    """The end of a whole answer; `matched` is the token that ended it, if one did."""

    reason: FinishReason
    matched: int | str | None = None


@define
class Deltas:
    """The replies of one answer: each token once, in its order.

    With `top` each has its log probability, and as many of the likeliest tokens' in its place.
    """

    top: int | None = None
    count: int = field(default=0, init=False)  # of the tokens that have been taken

    def take(self, choice: GrowingAnswer) -> Tokens | None:
        """Return the tokens that are new, None without any; raises `InternalError` if a log probability is missing."""
        begin, ids = self.count, choice.token_ids or ()
        new = tuple(ids[begin:])
        if not new:
            return None
        self.count = begin + len(new)
        if self.top is None:
            return one_token(new[0]) if len(new) == 1 else Tokens(new)
        return Tokens(new, read((choice.logprobs or ())[begin : self.count], new, self.top))


def ending(choice: GrowingAnswer, ends: tuple[int, ...]) -> Ending | None:
    """Return the end of an answer, None if it goes on; `ends` are the model's end-of-sequence tokens.

    Raises the error of an answer that is not whole: `AskerLeft` for one that was aborted.
    """
    reason = choice.finish_reason
    if reason in UNFINISHED:
        return None
    if reason == FinishReason.LENGTH:
        return Ending(FinishReason.LENGTH)
    if reason != FinishReason.STOP:
        raise _error(str(reason))
    matched = choice.stop_reason
    if matched is None and choice.token_ids and choice.token_ids[-1] in ends:
        matched = choice.token_ids[-1]
    return Ending(FinishReason.STOP, matched)


def _error(reason: str) -> RequestError:
    if reason == CANCELLED:
        return AskerLeft("the engine was told to end the answer")
    return InternalError(f"TensorRT-LLM ended an answer with the reason {reason[:40]!r}")
