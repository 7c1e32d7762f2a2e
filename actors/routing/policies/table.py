"""The routing policies that `[model.X] policy` may name: each is a file of this folder and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from attrs import field, frozen

from actors.routing.candidates import Chance, Policy
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy, KvSettings
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.policies.random_two import RandomTwo
from actors.routing.policies.round_robin import RoundRobin
from actors.routing.policies.session import BySession


@frozen
class PolicyContext:
    """The parts that a policy may be made of, for one model."""

    chance: Chance
    now: Callable[[], float]  # in seconds
    kv: KvSettings = KvSettings()
    index: PrefixIndex = field(factory=PrefixIndex)


MakePolicy: TypeAlias = Callable[[PolicyContext], Policy]


def stateless(policy: Policy) -> MakePolicy:
    """Return how a policy is made that is the same for all models."""
    return lambda _: policy


POLICIES: Mapping[str, MakePolicy] = {
    "kv": lambda context: KvPolicy(context.kv, context.index, context.chance, context.now),
    "least_loaded": stateless(least_loaded),
    "random_two": lambda context: RandomTwo(context.chance),
    "round_robin": lambda _: RoundRobin(),
    "session": lambda _: BySession(),
}
