"""The routing by prefix of one seed: its caches, what its policy weighs, and how what workers tell is spoiled.

It is drawn from a generator of its own, so that seeds which route by load alone remain what they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from attrs import field, frozen

from actors.routing.policies.kv.policy import KvSettings
from actors.routing.policies.kv.subscriber import RETRY_MAX_S
from tests.rig.fake_engine import Costs
from tests.rig.small_system import LiveCanary
from tests.system.simulator.caches import DELAYS_MAX, LAG_S, Caches
from tests.system.simulator.spoiled_events import Spoiling

SHARES = {"prefixes": 0.4, "canaries": 0.3}  # of the seeds; `python -m tests.system.hunt --prefixes`: 1
KV_TOKENS_MAX = 4096  # of engines that take pictures, whose prompts are long
GUIDES = (  # beginnings that prompts have in common
    "Be brief, name trees and say nothing of foxes.",
    "Be brief, name trees and say nothing of bears, however often you are asked for them.",
    "You live in an old oak.",
)
SPOILS = ("lost", "repeated", "late", "lies")


@frozen
class PrefixPlan:
    """What one seed has of routing by prefix."""

    page_size: int
    kv_tokens_max: int
    settings: KvSettings
    seed: int  # of the policies' own draws
    caches: Caches
    spoiling: Spoiling
    flushes: tuple[float, ...]  # when a cache is flushed
    crowd: int  # clients with long prompts, beside the others
    heals_s: float  # after which each worker has been asked again for its blocks
    _lives: Iterator[int] = field(factory=count)  # of publishers

    def new_life(self) -> str:
        """Return the name of another life of a publisher."""
        return f"life {next(self._lives)}"

    def apply(self, costs: Costs) -> None:
        """Let an engine keep a prefix cache; one that takes pictures has memory for them."""
        costs.prefix_cache, costs.page_size, costs.caches = True, self.page_size, self.caches
        costs.kv_tokens_max = KV_TOKENS_MAX if costs.media is not None else self.kv_tokens_max

    def chance(self, name: str) -> random.Random:
        """Return the generator of one part of the system."""
        return random.Random(f"{self.seed} {name}")


def aside(rng: random.Random) -> random.Random:
    """Return a generator that depends on the state of another one, and leaves it as it is."""
    return random.Random(repr(rng.getstate()))


def draw_prefixes(rng: random.Random, delay_s: float, *, tight: bool, planned: str = "") -> PrefixPlan | None:
    """Draw how a seed routes by prefix on a network of some usual delay, None if it does not.

    Memory may be `tight` where nothing is promised of how soon answers come. What workers report may be spoiled in a
    `planned` way.
    """
    if rng.random() >= SHARES["prefixes"] and not planned:
        return None
    caches = Caches(LAG_S + DELAYS_MAX * delay_s)
    spoils = planned or (rng.choice(SPOILS) if rng.random() < 0.4 else "")
    return PrefixPlan(
        page_size=rng.choice((2, 4, 4, 8)),
        kv_tokens_max=rng.choice((512, 512, 1024, 4096) if tight else (1024, 4096)),
        settings=KvSettings(
            load_tokens=rng.choice((0.0, 16.0, 256.0)),
            session_tokens=rng.choice((0.0, 64.0)),
            temperature=rng.choice((0.0, 0.0, 0.5)),
            blocks_max=rng.choice((256, 100_000, 100_000)),
        ),
        seed=rng.randrange(2**32),
        caches=caches,
        spoiling=Spoiling(spoils, random.Random(rng.randrange(2**32)), caches.ever),
        flushes=tuple(rng.random() * 5 for _ in range(rng.choice((0, 0, 1, 4)))),
        crowd=rng.choice((4, 8) if planned else (0, 4, 8)) if tight else 0,
        heals_s=RETRY_MAX_S + 1.0 if spoils else 0.0,
    )


def draw_canary(rng: random.Random) -> LiveCanary | None:
    """Draw whether idle engines are asked for a token, and after how long; they may be as slow as a fault makes them."""
    if rng.random() >= SHARES["canaries"]:
        return None
    return LiveCanary(after_s=rng.choice((0.3, 1.0, 3.0)), within_s=rng.choice((15.0, 20.0)))
