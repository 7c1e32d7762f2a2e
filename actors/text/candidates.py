"""Choices of which not all will be told: kept packed until it is known how likely each is, and then read once more."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import trio
from attrs import define, evolve, field

from actors.text.detokenizer import IncrementalDetokenizer
from protocol.messages import Logprob, Started, Tokens
from protocol.text_messages import Accepted, ChoiceEnded, Text

TOKENS_A_TURN = 16  # with their likeliest neighbours: about a millisecond

Emit = Callable[[Accepted | Started | Text | ChoiceEnded], None]


@define(eq=False)
class CandidateChoice:
    """One choice that may not be told: 4 bytes a token, and 12 for each log probability that will be told of it.

    It is called with what is read of it as it comes, of which it keeps how likely it is and how it ended.
    """

    speak: Emit
    _ids: array[int] = field(factory=lambda: array("i"))
    _logprobs: array[float] = field(factory=lambda: array("d"))
    _top_counts: array[int] = field(factory=lambda: array("B"))
    _top_ids: array[int] = field(factory=lambda: array("i"))
    _top_logprobs: array[float] = field(factory=lambda: array("d"))
    _total: float = 0.0
    _told: int = 0
    _ended: ChoiceEnded | None = None

    def __call__(self, reply: Accepted | Started | Text | ChoiceEnded) -> None:
        """Hear the next of what was read of it; what is said of the request as a whole is passed on."""
        match reply:
            case Text():
                self._total += sum([token.logprob for token in reply.logprobs])
                self._told += len(reply.logprobs)
            case ChoiceEnded():
                self._ended = reply
            case _:
                self.speak(reply)

    def note(self, tokens: Tokens, *, scored: bool) -> None:
        """Keep the next tokens, with their log probabilities if they will be told."""
        self._ids.extend(tokens.ids)
        for each in tokens.logprobs if scored else ():
            self._logprobs.append(each.logprob)
            self._top_counts.append(len(each.top))
            self._top_ids.extend([token for token, _ in each.top])
            self._top_logprobs.extend([value for _, value in each.top])

    def likelihood(self) -> float:
        """Return the mean log probability of its tokens."""
        return self._total / self._told if self._told else 0.0

    async def tell(self, reading: IncrementalDetokenizer, speak: Emit) -> None:
        """Read it once more, a few tokens a turn, and say what that gives; `reading` says under which number."""
        at = 0
        for begin in range(0, len(self._ids), TOKENS_A_TURN):
            end = min(begin + TOKENS_A_TURN, len(self._ids))
            scores: list[Logprob] = []
            for place in range(begin, end) if self._logprobs else ():
                upto = at + self._top_counts[place]
                top = tuple(zip(self._top_ids[at:upto], self._top_logprobs[at:upto], strict=True))
                scores.append(Logprob(self._logprobs[place], top))
                at = upto
            if (text := reading.feed(self._ids[begin:end], scores)) is not None:
                speak(text)
            await trio.lowlevel.checkpoint()
        if (text := reading.finish()) is not None:
            speak(text)
        assert self._ended is not None
        speak(evolve(self._ended, choice=reading.choice))
        await trio.lowlevel.checkpoint()


def plain(tokens: Tokens) -> Tokens:
    """Return tokens without the likeliest ones beside them."""
    return Tokens(tokens.ids, tuple([Logprob(each.logprob) for each in tokens.logprobs]))
