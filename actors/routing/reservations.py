"""What a router has promised of workers that they do not count themselves: places, and shares of prefills."""

from __future__ import annotations

from collections import Counter

from attrs import define, evolve, field

from actors.routing.load import Load


@define(eq=False)
class _Handed:
    """Prompts at one prefill for one decode."""

    requests: int = 0
    tokens: int = 0


@define(eq=False)
class Reservations:
    """What is kept at workers, by their names, for those that are about to ask: requests, and tokens of prompts.

    And prompts at prefills by the decodes that they are for, from the choice of a pair until they have begun, which is
    once the decode has the cache. One decode that takes none would fill a bound for all; its share it fills alone.
    """

    requests: Counter[str] = field(factory=Counter)
    prompts: Counter[str] = field(factory=Counter)
    pending: dict[str, dict[str, _Handed]] = field(factory=dict)  # by prefill and decode

    def add(self, prefill: str, decode: str, prompt: int) -> None:
        """Note that a prompt of so many tokens is to go through a prefill to a decode."""
        handed = self.pending.setdefault(prefill, {}).setdefault(decode, _Handed())
        handed.requests += 1
        handed.tokens += prompt

    def discard(self, prefill: str, decode: str, prompt: int) -> None:
        """Note that it is pending there no more."""
        of_prefill = self.pending[prefill]
        handed = of_prefill[decode]
        handed.requests -= 1
        handed.tokens -= prompt
        if not handed.requests:
            del of_prefill[decode]
        if not of_prefill:
            del self.pending[prefill]

    def takes(self, prefill: Load, decode: str, decodes: int) -> bool:
        """Whether a prefill has room for one more prompt for one of so many decodes.

        The first of a decode it takes with any free slot. More than one have room in the decode's share of tokens and
        of slots, where a slot is left for each decode that has nothing there.
        """
        of_prefill = self.pending.get(prefill.name, {})
        if (handed := of_prefill.get(decode)) is None:
            return True
        if prefill.shared_max and handed.tokens * decodes >= prefill.shared_max:
            return False
        without = max(0, decodes - len(of_prefill))
        return handed.requests * decodes < prefill.slots and prefill.busy + without < prefill.slots

    def keep(self, name: str, prompt: int) -> None:
        """Keep a place for a request with a prompt of so many tokens."""
        self.requests[name] += 1
        self.prompts[name] += prompt

    def let_go(self, name: str, prompt: int) -> None:
        """Keep it no longer."""
        self.requests[name] -= 1
        self.prompts[name] -= prompt
        if not self.requests[name]:
            del self.requests[name], self.prompts[name]

    def with_kept(self, load: Load) -> Load:
        """Return a load as it is when all for whom places are kept have asked."""
        if load.name not in self.requests:
            return load
        requests, prompts = self.requests[load.name], self.prompts[load.name]
        return evolve(load, busy=load.busy + requests, pending=load.pending + prompts)
