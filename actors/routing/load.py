"""The load of a worker, and what a routing policy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from attrs import frozen

from protocol.cluster import Leg
from protocol.messages import Generate


@frozen
class Load:
    """The load of a worker: `busy` requests on `slots` places, and the tokens that they hold.

    `kv_tokens` of its `kv_tokens_max` tokens of KV memory are held or promised; a maximum of 0 says that this is not
    known. `pending` counts the prompt tokens that this node gave it and that have no first token yet; with a
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
    leg: Leg = Leg.BOTH

    @property
    def full(self) -> bool:
        """Whether one more would have to wait for a slot, or behind prompts enough to keep it busy."""
        return self.busy >= self.slots or 0 < self.pending_max <= self.pending

    @property
    def overcommitted(self) -> bool:
        """Whether some of what it has may have to wait: it has more requests than slots, or than its memory holds."""
        return self.busy > self.slots or (self.kv_tokens_max > 0 and self.kv_tokens > self.kv_tokens_max)

    def fits(self, request: Generate) -> bool:
        """Whether its KV memory has room for all that a request may come to there, as far as is known."""
        return self.kv_tokens_max == 0 or self.kv_tokens + self.tokens_of(request) <= self.kv_tokens_max

    def tokens_of(self, request: Generate) -> int:
        """Return how many tokens of a request it holds at most: a prefill those of its prompt, others all."""
        prompt = len(request.tokens)
        return prompt if self.leg is Leg.PREFILL else prompt + request.sampling.tokens_max


Policy: TypeAlias = Callable[[Generate, Sequence[Load]], int]
"""Chooses the worker of a request: returns its place among the loads of those with room, at least one.

A request that goes on after the loss of a worker comes with what it has answered at the end of its prompt. A policy
is pure: it may be asked more than once for a request, and for either leg of a pair.
"""
