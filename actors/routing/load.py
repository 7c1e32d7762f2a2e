"""How busy a worker is, and which of several gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import frozen


@frozen
class Load:
    """How busy a worker is: requests that it has, of as many as it runs at once, and the tokens that they hold.

    `kv_tokens` of its `kv_tokens_max` tokens of KV memory are held or promised; a maximum of 0 says that this is not
    known. Of `pending` tokens are the prompts that it was given from here and that have not begun; with a
    `pending_max` above 0 it is given no more than that at a time, and one prompt. Of a prefill the decodes share
    `shared_max` instead. No two workers of one pool have the same `name`.
    """

    name: str
    busy: int
    slots: int
    tokens: int = 0
    kv_tokens: int = 0
    kv_tokens_max: int = 0
    pending: int = 0
    pending_max: int = 0
    shared_max: int = 0

    @property
    def full(self) -> bool:
        """Whether one more would have to wait for a slot, or behind prompts enough to keep it busy."""
        return self.busy >= self.slots or 0 < self.pending_max <= self.pending

    @property
    def overcommitted(self) -> bool:
        """Whether some of what it has may have to wait: it has more requests than slots, or than its memory holds."""
        return self.busy > self.slots or (self.kv_tokens_max > 0 and self.kv_tokens > self.kv_tokens_max)

    def fits(self, tokens: int) -> bool:
        """Whether its KV memory has room for so many more tokens, as far as is known."""
        return self.kv_tokens_max == 0 or self.kv_tokens + tokens <= self.kv_tokens_max


Policy: TypeAlias = Callable[[Sequence[Load], int], int | None]
"""Returns the place of the worker that gets a request of so many tokens, None if all must wait."""


def least_loaded(loads: Sequence[Load], tokens: int = 0) -> int | None:
    """Return the place of the worker to ask for so many tokens, None if all are full.

    Those whose KV memory has room come first, then those with the largest share of slots free, then those with the
    least to compute; the same loads always give the same one.
    """

    def rank(at: int) -> tuple[bool, float, int, str]:
        load = loads[at]
        return not load.fits(tokens), load.busy / load.slots, load.tokens, load.name

    return min((at for at, load in enumerate(loads) if not load.full), key=rank, default=None)
