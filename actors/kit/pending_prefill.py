"""Prompts on their way to their first tokens: how many tokens of them an engine has, and how many it may have.

An engine computes prompts first come, first served. Whatever is inside it is served in that order, whoever sent it, so
a key that sends hundreds of long prompts makes everybody wait for all of those that are inside. What is not inside can
be overtaken: queues let owners take turns. So an engine is given as many prompt tokens as keep it busy, and no more.
"""

from __future__ import annotations

from collections.abc import Hashable

from attrs import define, field


@define(eq=False)
class PendingPrefill:
    """Prompts whose first tokens are not there yet, by whatever key; `tokens_max` 0 stands for no bound."""

    tokens_max: int = 0
    tokens: int = 0
    _sizes: dict[Hashable, int] = field(factory=dict)

    def fits(self, size: int) -> bool:
        """Whether one more prompt may be added; the first may, however long it is."""
        return not self.tokens or not self.tokens_max or self.tokens + size <= self.tokens_max

    def add(self, key: Hashable, size: int) -> None:
        """Note a prompt of so many tokens."""
        self._sizes[key] = size
        self.tokens += size

    def discard(self, key: Hashable) -> bool:
        """Note that a prompt is pending no more, for whatever reason, and return whether it was."""
        size = self._sizes.pop(key, None)
        self.tokens -= size or 0
        return size is not None
