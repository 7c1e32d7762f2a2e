"""Shares: the one rule for everything that the owners of requests (clients' keys) share.

Memory, threads, processes, places and slots are counted in *units*. Three limits hold for the units of a budget:

- *the total* of all owners together;
- *one owner's part*. Not even a single call exceeds it: a call for more could never fit, and is refused at once;
- *the room of large calls*. Small calls have the rest for themselves, even if several owners have large calls.

So a small call of one owner finds room at once, however much another owner asks for. The users of the rule decide who
waits, who is refused and who is next, but never how much one owner may have.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from attrs import frozen

OWNER_PART = 0.75
"""One owner's part of a budget."""

LARGE_PART = 15 / 16
"""The part of a budget for all large calls together."""

SMALL_PART = 1 / 32
"""The part of a budget up to which a call is small."""


class Obstacle(Enum):
    """The limit by which a call does not get its units now."""

    TOTAL = "total"
    OWNER = "owner"
    LARGE = "large"


@frozen
class BudgetLimits:
    """The limits of one budget, in units."""

    total: int
    owner_max: float  # of one owner, in one call or in many
    large_max: float = inf  # of all large calls together
    small_max: int = 0  # a call for at most so many units is small

    @classmethod
    def of_all_sizes(cls, total: int, owner_max: float = inf) -> BudgetLimits:
        """Return the limits of units for calls of any size; `owner_max` may lower one owner's part."""
        own = owner_part(total)
        return cls(total, min(own, owner_max), max(own, int(total * LARGE_PART)), max(1, int(total * SMALL_PART)))

    @classmethod
    def of_places(cls, places: int) -> BudgetLimits:
        """Return the limits of places, such as threads, for calls that each take one."""
        return cls(places, owner_part(places))

    @classmethod
    def of_slots(cls, slots: int, kept: int) -> BudgetLimits:
        """Return the limits of slots of which one owner leaves `kept` to others, and has at least one."""
        return cls(slots, max(1, slots - kept))

    @property
    def call_max(self) -> int:
        """The most units of one call."""
        return int(min(self.total, self.owner_max))

    def never_fits(self, units: int) -> bool:
        """Whether a call for so many units is more than one owner may have."""
        return units > self.call_max

    def is_small(self, units: int) -> bool:
        """Whether a call for so many units may take from the room of small calls."""
        return units <= self.small_max

    def has_small_room(self, units: int, small: float) -> bool:
        """Whether the room of small calls has so many units left, with `small` units taken by small calls."""
        return small + units <= self.total - self.large_max

    def obstacle(
        self, units: int, *, owned: float, taken: float = 0, large: float = 0, small: bool = False
    ) -> Obstacle | None:
        """Return the limit by which a call does not get its units now, None if there is none.

        `taken` are the units of all calls, `owned` of its owner's calls, `large` of all large calls.
        """
        if owned + units > self.owner_max:
            return Obstacle.OWNER
        if taken + units > self.total:
            return Obstacle.TOTAL
        if not small and large + units > self.large_max:
            return Obstacle.LARGE
        return None


def owner_part(total: int, part: float = OWNER_PART) -> int:
    """Return one owner's part of a total, at least one unit."""
    return max(1, int(total * part))
