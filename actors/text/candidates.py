"""Candidates: more choices than a request answers, kept as packed arrays until the likeliest can be chosen."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TypeAlias

import trio
from attrs import define, evolve, field

from actors.text.staged_text import StagedText
from protocol.dialects.logprobs import finite
from protocol.messages.generation import FinishReason, Logprob, Started, Tokens
from protocol.messages.text import Accepted, AnswerPiece, ChoiceEnded, Text

# Tokens with their top log probabilities that are replayed in a turn: about a millisecond.
TOKENS_A_TURN = 16

Emit: TypeAlias = Callable[[Accepted | Started | AnswerPiece | ChoiceEnded], None]


@define(eq=False)
class CandidateChoice:
    """One candidate: 4 bytes a token, and 12 for each log probability of the answer.

    It takes the place of `emit` while the choice is read: it keeps the likelihood and the end of the choice, and drops
    its text. The text of a chosen candidate is made again from the token ids.
    """

    emit: Emit
    scored: bool = True  # the log probabilities of the answer are wanted
    _ids: array[int] = field(factory=lambda: array("i"))
    _logprobs: array[float] = field(factory=lambda: array("d"))
    _top_counts: array[int] = field(factory=lambda: array("B"))
    _top_ids: array[int] = field(factory=lambda: array("i"))
    _top_logprobs: array[float] = field(factory=lambda: array("d"))
    _total: float = 0.0
    _tokens: int = 0
    _ended: ChoiceEnded | None = None

    def __call__(self, reply: Accepted | Started | AnswerPiece | ChoiceEnded) -> None:
        """Take the next reply of the choice; replies about the request as a whole are passed on."""
        match reply:
            case Text():
                self._total += sum([finite(token.logprob) for token in reply.logprobs])
                self._tokens += len(reply.logprobs)
            case ChoiceEnded():
                self._ended = reply
            case _:
                self.emit(reply)

    def noted(self, tokens: Tokens) -> Tokens:
        """Keep the next tokens, and their log probabilities if `scored`; return them without the top ones."""
        self._ids.extend(tokens.ids)
        for scores in tokens.logprobs if self.scored else ():
            self._logprobs.append(scores.logprob)
            self._top_counts.append(len(scores.top))
            self._top_ids.extend([token for token, _ in scores.top])
            self._top_logprobs.extend([value for _, value in scores.top])
        return Tokens(tokens.ids, tuple([Logprob(scores.logprob) for scores in tokens.logprobs]))

    def likelihood(self) -> float:
        """Return the mean log probability of its tokens."""
        return self._total / self._tokens if self._tokens else 0.0

    async def replay(self, text: StagedText, emit: Emit) -> ChoiceEnded:
        """Detokenise the choice again, a few tokens a turn; emit it as the choice of `text`, and return its end."""
        start = 0
        for begin in range(0, len(self._ids), TOKENS_A_TURN):
            end = min(begin + TOKENS_A_TURN, len(self._ids))
            logprobs: list[Logprob] = []
            for index in range(begin, end) if self._logprobs else ():
                stop = start + self._top_counts[index]
                top = tuple(zip(self._top_ids[start:stop], self._top_logprobs[start:stop], strict=True))
                logprobs.append(Logprob(self._logprobs[index], top))
                start = stop
            text.take(self._ids[begin:end], logprobs)
            for piece in text.give():
                emit(piece)
            await trio.lowlevel.checkpoint()
        assert self._ended is not None
        text.finish(cut=self._ended.reason is FinishReason.LENGTH)
        while text.waits:
            for piece in text.give():
                emit(piece)
            await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        return evolve(self._ended, choice=text.detokenizer.choice)
