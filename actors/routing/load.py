"""The load of a worker, as routers compare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen

from protocol.cost import kv_tokens
from protocol.messages.cluster import Leg
from protocol.messages.generation import Generate

PROMPTS_AHEAD = 4
"""The most prompts ahead of a request at one worker, as a multiple of its engine's own at a time."""


@frozen
class Load:
    """The load of a worker: `busy` requests on `slots` places, and their tokens.

    `tokens` are the most that its requests may come to hold (`protocol.cost.kv_tokens`); policies compare workers by
    them. `kv_tokens` are held by its KV memory or promised, of `kv_tokens_max` (0: unknown). `pending` counts this
    node's prompt tokens there without a first token. With a `pending_max` above 0 it gets further prompts only while
    fewer are pending; a longer single prompt is allowed. Not so while `kv_tokens` exceed the memory: then prompts may
    wait for memory there, and hold up none for which there is some. A prefill has `shared_max` instead: its decodes
    have equal shares of it. No two workers of one pool have the same `name`.

    `own` of the requests are this node's, `unstarted` of its own have no first token. `routers` nodes ask the worker,
    and this one has `place` among them, from 0. `reserved` of the busy ones are reservations, for chosen requests on
    their way. One of several routers, with less than an equal share of the slots, may let one request wait for a slot
    there: the others would refill each slot that they free, and so leave the next one to it.

    `queued` are the prompt tokens ahead of another request there, other nodes' included. `page_size` is its prefix
    cache's, in tokens (0: unknown).
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
    own: int = 0
    unstarted: int = 0
    routers: int = 1
    place: int = 0
    reserved: int = 0
    queued: int = 0
    page_size: int = 0

    @property
    def full(self) -> bool:
        """Whether one more request would wait there, for a slot or behind prompts enough, and may not (`may_wait`)."""
        no_slot = self.busy >= self.slots and not self.may_wait
        return no_slot or (0 < self.pending_max <= self.pending and not self._exceeds_memory)

    @property
    def may_wait(self) -> bool:
        """Whether one more request of this node may wait for a slot there, so that others cannot keep all slots."""
        return self.routers > 1 and not self.unstarted and self.own < max(1, self.slots // self.routers)

    @property
    def overcommitted(self) -> bool:
        """Whether some of its requests may have to wait: they exceed its slots or its memory."""
        return self.busy > self.slots or self._exceeds_memory

    @property
    def _exceeds_memory(self) -> bool:
        return self.kv_tokens_max > 0 and self.kv_tokens > self.kv_tokens_max

    def fits(self, request: Generate, cached: int = 0) -> bool:
        """Whether its KV memory has room for a request's largest need there; true if unknown.

        `cached` tokens of its prompt are in its cache.
        """
        return self.kv_tokens_max == 0 or self.kv_tokens_with(request, cached) <= self.kv_tokens_max

    def kv_tokens_with(self, request: Generate, cached: int = 0) -> int:
        """Return the held and promised tokens of its KV memory with one more request."""
        return self.kv_tokens + kv_tokens(request, self.leg, cached)


def has_room(load: Load) -> bool:
    """Whether a worker may get one more request, perhaps to wait there (`Load.may_wait`)."""
    return not load.full


def begins(load: Load) -> bool:
    """Whether one more request would get a slot at once, and its prompt be computed next."""
    return load.busy < load.slots and not load.full


@frozen
class BeginsNow:
    """Whether a request that moves would begin there at once: it waits neither for memory nor behind other prompts."""

    request: Generate

    def __call__(self, load: Load) -> bool:
        """Return whether there is a slot, room for a prompt, and KV memory for the request."""
        return begins(load) and load.fits(self.request)


def may_queue(load: Load) -> bool:
    """Whether one more request would get a slot at once, though its prompt may wait there behind a few others."""
    return load.busy < load.slots and (not load.pending_max or load.pending < PROMPTS_AHEAD * load.pending_max)


HasRoom: TypeAlias = Callable[[Load], bool]
"""Whether a worker with this load may be given one more request, in one of these senses."""
