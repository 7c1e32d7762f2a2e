"""The routing policies that `[model.X] policy` may name: each is a file of this folder and a row here.

A policy by more than loads has a feed (`feed.py`), which its row makes together with it. The rest of a node may not
test for a policy by its name: a property of a policy is a field of its row.
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy
from actors.routing.policies.kv.subscriber import PrefixSubscriber
from actors.routing.policies.least_loaded import least_loaded
from actors.routing.policies.random_two import RandomTwo
from actors.routing.policies.round_robin import RoundRobin
from actors.routing.policies.row import MadePolicy, PolicyContext, PolicyRow, stateless, without_feed
from actors.routing.policies.session import BySession


def _kv(context: PolicyContext) -> MadePolicy:
    index = PrefixIndex(context.kv.blocks_max)
    policy = KvPolicy(context.kv, index, context.chance, context.now)
    return MadePolicy(policy, feed=PrefixSubscriber(context.pool, index))


POLICIES: Mapping[str, PolicyRow] = {
    "kv": PolicyRow(_kv, follows_blocks=True, feed_name="prefixes"),
    "least_loaded": stateless(least_loaded),
    "random_two": without_feed(lambda context: RandomTwo(context.chance)),
    "round_robin": without_feed(lambda _: RoundRobin()),
    "session": without_feed(lambda _: BySession()),
}
