"""The budget of one choice's reasoning: at its end the reasoning is closed, and the answer goes on behind it.

No engine counts tokens of reasoning, and none can be told to write a text. So the request is left, as where a stop
string ends it, and asked for again: with the answer so far and the mark of the end of reasoning at the end of its
prompt. All of that is in the prefix cache but the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from attrs import define, evolve, field

from actors.text.model import TextModel
from actors.text.staged_text import StagedText
from protocol.messages.generation import Generate
from protocol.messages.text import Respond
from protocol.token_ids import TokenIds


@define(eq=False)
class ThoughtBudget:
    """The tokens of the answer so far, of which reasoning may have `tokens_max`; None for any number."""

    tokens_max: int | None
    tokens_of: Callable[[str], TokenIds]
    ids: list[int] = field(factory=list)  # of the answer so far
    _closing: tuple[int, ...] = ()  # of the mark that is to be written next
    _closings: int = 0

    @classmethod
    def of(cls, request: Respond, model: TextModel) -> Self:
        """Return the budget of a choice."""
        return cls(request.thinking_token_budget, lambda text: model.encode_text(text, special=False))

    def ends(self, ids: Sequence[int], text: StagedText, generate: Generate) -> bool:
        """Note the next tokens of the answer; return whether its reasoning has to be closed behind them."""
        if self.tokens_max is None:
            return False
        self.ids += ids
        mark = text.stage.thought_end
        if mark is None or text.reasoning_tokens < self.tokens_max:
            return False
        closing = self.tokens_of(f"\n{mark}\n\n")
        # Without room for an answer, the limit of tokens ends it all.
        if len(self.ids) + len(closing) >= generate.sampling.tokens_max:
            return False
        self._closing = tuple(closing)
        return True

    def closing(self) -> tuple[int, ...]:
        """Return the tokens that close the reasoning now; none if it need not be closed. They belong to the answer."""
        closing, self._closing = self._closing, ()
        self.ids += closing
        self._closings += bool(closing)
        return closing

    def rest(self, generate: Generate) -> Generate:
        """Return the request for the rest of the answer to a choice's own request."""
        sampling = evolve(generate.sampling, tokens_max=generate.sampling.tokens_max - len(self.ids))
        last = int(generate.id[-4:], 16) ^ (0x8000 + self._closings)
        return evolve(
            generate,
            id=f"{generate.id[:-4]}{last:04x}",
            tokens=generate.tokens + TokenIds.of(self.ids),
            sampling=sampling,
            resumed_tokens=len(self.ids),
        )
