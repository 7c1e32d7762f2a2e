"""Reservations: a router's promises that workers do not count yet.

A worker counts a request from the turn in which it is asked. Between the choice and that turn other requests are
routed, and would all go to the same worker: a *reservation* counts for it meanwhile. Prompts at prefills are counted
here for longer, by their decode, until the decode has the KV cache. A decode that takes no caches would use up a
prefill's limit for all decodes; so each decode has a share of it.
"""

from __future__ import annotations

from collections import Counter

from attrs import define, evolve, field, frozen

from actors.routing.load import Load


@define(eq=False)
class _PairPrompts:
    """The prompts at one prefill for one decode."""

    requests: int = 0
    tokens: int = 0


@frozen
class ReservationStatistics:
    """The numbers of reservations at one moment, at all workers together."""

    requests: int
    prompts_pending: int  # at prefills


@define(eq=False)
class Reservations:
    """Requests and prompt tokens reserved at workers, by name; and prompts pending at prefills, by decode."""

    requests: Counter[str] = field(factory=Counter)
    prompts: Counter[str] = field(factory=Counter)
    pending: dict[str, dict[str, _PairPrompts]] = field(factory=dict)  # prompts by prefill and decode

    def statistics(self) -> ReservationStatistics:
        """Return the numbers of reservations."""
        pending = (prompts for by_decode in self.pending.values() for prompts in by_decode.values())
        return ReservationStatistics(self.requests.total(), sum(prompts.requests for prompts in pending))

    def add(self, prefill: str, decode: str, prompt: int) -> None:
        """Add a prompt, in tokens, that goes through a prefill to a decode."""
        prompts = self.pending.setdefault(prefill, {}).setdefault(decode, _PairPrompts())
        prompts.requests += 1
        prompts.tokens += prompt

    def discard(self, prefill: str, decode: str, prompt: int) -> None:
        """Remove such a prompt: it has begun, or has ended."""
        by_decode = self.pending[prefill]
        prompts = by_decode[decode]
        prompts.requests -= 1
        prompts.tokens -= prompt
        if not prompts.requests:
            del by_decode[decode]
        if not by_decode:
            del self.pending[prefill]

    def has_room(self, prefill: Load, decode: str, decodes: int) -> bool:
        """Whether a prefill has room for one more prompt for a decode, which is one of `decodes`.

        There is room for the first prompt of a decode in any free slot, and for more in its share of tokens and slots;
        one slot is left free for each decode that has no prompt there.
        """
        by_decode = self.pending.get(prefill.name, {})
        if (prompts := by_decode.get(decode)) is None:
            return True
        if prefill.shared_max and prompts.tokens * decodes >= prefill.shared_max:
            return False
        absent_decodes = max(0, decodes - len(by_decode))
        return prompts.requests * decodes < prefill.slots and prefill.busy + absent_decodes < prefill.slots

    def reserve(self, name: str, prompt: int) -> None:
        """Reserve a place for a request with a prompt of so many tokens."""
        self.requests[name] += 1
        self.prompts[name] += prompt

    def release(self, name: str, prompt: int) -> None:
        """Release a reservation."""
        self.requests[name] -= 1
        self.prompts[name] -= prompt
        if not self.requests[name]:
            del self.requests[name], self.prompts[name]

    def with_reserved(self, load: Load) -> Load:
        """Return a load as it will be once all requests with a reservation are there."""
        if load.name not in self.requests:
            return load
        requests, prompts = self.requests[load.name], self.prompts[load.name]
        own, unstarted = load.own + requests, load.unstarted + requests
        busy, pending = load.busy + requests, load.pending + prompts
        queued = load.queued + prompts
        return evolve(load, busy=busy, pending=pending, own=own, unstarted=unstarted, reserved=requests, queued=queued)
