"""A row of the table of policies: what a policy is made of, and what the rest of a node must know of it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from actors.routing.candidates import Chance, Policy
from actors.routing.policies.feed import Feed, WatchablePool
from actors.routing.policies.kv.policy import KvSettings


@frozen
class PolicyContext:
    """The parts that a policy may be made of, for one model."""

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


def stateless(policy: Policy) -> PolicyRow:
    """Return the row of a policy that remembers nothing, and is the same for all models."""
    return PolicyRow(lambda _: MadePolicy(policy))


def without_feed(make: Callable[[PolicyContext], Policy]) -> PolicyRow:
    """Return the row of a policy that chooses by loads, and by what it remembers of its own choices."""
    return PolicyRow(lambda context: MadePolicy(make(context)))
