"""Pending prefill: the prompt tokens inside an engine, of requests without a first token.

An engine computes prompts first come, first served. So one client with hundreds of long prompts makes all others wait
for as many of them as are inside the engine. Outside, prompts can be overtaken: inboxes let owners take turns. An
engine is therefore given as many prompt tokens as keep it busy, and no more.

Behind a longer prompt, which is given alone, as many others may follow at once: they wait for it anyway.
"""

from __future__ import annotations

from collections.abc import Hashable

from attrs import define, field


@define(eq=False)
class PendingPrefill:
    """The prompts without a first token, each under a key; `tokens_max` 0 means no bound."""

    tokens_max: int = 0
    tokens: int = 0
    _longer_tokens: int = 0  # the tokens of prompts longer than the bound
    _sizes: dict[Hashable, int] = field(factory=dict)

    @property
    def prompts(self) -> int:
        """The number of prompts that are pending."""
        return len(self._sizes)

    def fits(self, size: int) -> bool:
        """Whether a prompt of `size` tokens may be added; a first one may, however long it is."""
        return not self.tokens or not self.tokens_max or self.tokens + size <= self.tokens_max

    def fits_behind_longer(self, size: int) -> bool:
        """Whether a prompt of `size` tokens fits, or would without the longer prompts."""
        return self.fits(size) or self.tokens - self._longer_tokens + size <= self.tokens_max

    def is_longer(self, size: int) -> bool:
        """Whether a prompt of `size` tokens is longer than the bound, and only fits alone."""
        return 0 < self.tokens_max < size

    @property
    def has_longer(self) -> bool:
        """Whether a longer prompt is pending; prompts added meanwhile wait for it."""
        return self._longer_tokens > 0

    def add(self, key: Hashable, size: int) -> None:
        """Add a prompt of `size` tokens."""
        self._sizes[key] = size
        self.tokens += size
        if self.is_longer(size):
            self._longer_tokens += size

    def discard(self, key: Hashable) -> bool:
        """Remove a prompt, if it is pending; return whether it was."""
        if (size := self._sizes.pop(key, None)) is None:
            return False
        self.tokens -= size
        if self.is_longer(size):
            self._longer_tokens -= size
        return True
