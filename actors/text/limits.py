"""The limits of prompts and answers in tokens, and the errors of a prompt that exceeds them."""

from __future__ import annotations

from attrs import evolve, frozen

from protocol.errors import ContextTooLong
from protocol.messages.engine import EngineInfo
from protocol.messages.text import Respond


@frozen
class PromptLimits:
    """The limits of one request, in tokens: of prompt and answer together, and of the prompt alone."""

    info: EngineInfo
    total_max: int
    prompt_max: int
    # The page sizes of the engines, if prompts are routed by the contents of prefix caches.
    page_sizes: tuple[int, ...] = ()

    @property
    def tokens_max(self) -> int:
        """The most tokens of a prompt: at least one of the total is the answer's."""
        return min(self.prompt_max, self.total_max - 1)

    def within(self, total_max: int | None) -> PromptLimits:
        """Return the limits of a request that was admitted with `total_max` tokens in all; None for any number."""
        if total_max is None or total_max >= self.total_max:
            return self
        return evolve(self, total_max=total_max, prompt_max=min(self.prompt_max, total_max))

    def fits(self, request: Respond, length: int) -> bool:
        """Whether a prompt of this length fits, together with the answer that is asked for."""
        return length <= self.prompt_max and length + (request.tokens_max or 1) <= self.total_max

    def check_length(self, request: Respond, length: int, prompt: str) -> None:
        """Raise `ContextTooLong` unless a prompt of this length fits; `prompt` is its name in the error."""
        if length > self.tokens_max:
            raise self.too_long(request, str(length), prompt)
        if request.tokens_max is not None and length + request.tokens_max > self.total_max:
            raise ContextTooLong(
                f"{prompt} is {length} tokens long, and {request.tokens_max} more are asked for;"
                f" together they can have {self.total_max}",
                param=request.param("tokens_max"),
            )

    def too_long(self, request: Respond, length: str, prompt: str) -> ContextTooLong:
        """Return the error of a prompt that is too long by itself."""
        together = f"prompt and answer together can have {self.total_max}"
        alone = f"prompts here can have {self.prompt_max}"
        limit = together if self.total_max <= self.prompt_max else alone
        return ContextTooLong(f"{prompt} is {length} tokens long, and {limit}", param=request.param("turns"))
