"""An answer in one piece: what the replies of its choices come to."""

from __future__ import annotations

from attrs import define, field

from protocol.messages import Accepted, ChoiceEnded, FinishReason, Started, Text, TokenText


@define(eq=False)
class Choice:
    """One choice as far as it was told."""

    texts: list[Text] = field(factory=list)
    ended: ChoiceEnded | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join([each.text for each in self.texts])

    @property
    def logprobs(self) -> list[TokenText]:
        """Every token with its log probability, if they were asked for."""
        return [token for each in self.texts for token in each.logprobs]

    @property
    def ids(self) -> list[int]:
        """Every token id, if they were asked for."""
        return [token for each in self.texts for token in each.ids]

    @property
    def reason(self) -> FinishReason:
        """How it ended, which it must have."""
        assert self.ended is not None
        return self.ended.reason


@define(eq=False)
class Gathered:
    """Every reply of one request so far, by choice."""

    _choices: dict[int, Choice] = field(factory=dict)

    def add(self, reply: Accepted | Started | Text | ChoiceEnded) -> None:
        """Take the next reply, of whatever kind."""
        match reply:
            case Text():
                self._choices.setdefault(reply.choice, Choice()).texts.append(reply)
            case ChoiceEnded():
                self._choices.setdefault(reply.choice, Choice()).ended = reply

    def whole(self, choices: int) -> list[Choice]:
        """Return all the choices in their order; each must have ended, so that none looks whole that is not."""
        whole = [self._choices[index] for index in sorted(self._choices)]
        assert len(whole) == choices
        assert all(choice.ended is not None for choice in whole)
        return whole
