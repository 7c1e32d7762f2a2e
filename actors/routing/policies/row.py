"""A row of the table of policies: the maker of a policy, and its properties for the rest of a node."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from actors.routing.candidates import Chance, Policy
from actors.routing.policies.feed import Feed, WatchablePool
from actors.routing.policies.kv.policy import KvSettings


@frozen
class PolicyContext:
    """The parts for the policy of one model."""

    chance: Chance
    now: Callable[[], float]  # in seconds
    pool: WatchablePool
    kv: KvSettings = KvSettings()


@frozen
class MadePolicy:
    """The policy of one model, and its feed if it has one."""

    policy: Policy
    feed: Feed | None = None


@frozen
class PolicyRow:
    """One row of the table."""

    make: Callable[[PolicyContext], MadePolicy]
    # Whether it looks for blocks of prompts in the caches of workers: prompts are hashed, and engines publish blocks.
    follows_blocks: bool = False
    # The prefix of the name of its feed's child, reserved among the names of engines; empty without a feed.
    feed_name: str = ""


def stateless(policy: Policy) -> PolicyRow:
    """Return the row of a policy without state, the same for all models."""
    return PolicyRow(lambda _: MadePolicy(policy))


def without_feed(make: Callable[[PolicyContext], Policy]) -> PolicyRow:
    """Return the row of a policy by loads and by its own choices."""
    return PolicyRow(lambda context: MadePolicy(make(context)))
