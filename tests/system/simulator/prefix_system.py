"""The part of a system that has to do with prefix caches: publishers beside engines, and subscribers beside routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import trio
from attrs import define, field

from actors.engines.simulated.engine import SimulatedEngine
from actors.routing.candidates import Policy
from actors.routing.policies.kv.expected import ExpectedPrefixes
from actors.routing.policies.kv.index import PrefixIndex
from actors.routing.policies.kv.policy import KvPolicy
from actors.routing.policies.kv.subscriber import PrefixSubscriber
from actors.routing.policies.least_loaded import least_loaded
from protocol.errors import EngineLost, Overloaded
from protocol.messages.cluster import Leg
from protocol.messages.kind import Message
from protocol.messages.kv_events import WatchBlocks
from protocol.messages.operations import OPERATION_OF, FlushCache
from supervisor.cluster.directory import Directory
from supervisor.cluster.model_pool import ModelPool
from supervisor.engines.publishers import engine_publisher, publishers_tree
from supervisor.links.serving import Service, Services, under_name
from supervisor.node import router_child
from supervisor.supervision.tree import Child, Tree
from tests.rig.small_system import SmallSystem
from tests.system.simulator.caches import CacheLife, CheckedPolicy
from tests.system.simulator.picture_system import PictureSystem
from tests.system.simulator.prefix_plan import GUIDES, PrefixPlan

WATCHES = 2  # streams to each engine: its blocks, and its load
UNWATCHED = {Leg.DECODE, Leg.ENCODE}


@define(eq=False)
class NodePublishers:
    """The publishers of one node's engines, none without a plan."""

    plan: PrefixPlan | None
    directory: Directory
    system: SmallSystem
    trees: tuple[Tree, ...] = field(init=False, default=())
    services: Services = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.plan is None:
            return
        runtime: Any = SimpleNamespace(new_id=self.plan.new_life)
        names = list(self.directory.local)[: len(self.system.engines)]
        made = [
            engine_publisher(runtime, name, engine) for name, engine in zip(names, self.system.engines, strict=True)
        ]
        self.trees = publishers_tree([child for child, _ in made])
        self.services = {
            key: self.plan.spoiling.of(service) if key[1] is WatchBlocks else service
            for _, services in made
            for key, service in services.items()
        }
        for worker in self.directory.local.values():
            worker.services = {**worker.services, **under_name(worker.engine_name, self.services)}

    @property
    def line_watches(self) -> int:
        """The streams that each engine answers all the time."""
        return WATCHES if self.plan is not None else 0

    def serving(self, wanted: Services) -> Services:
        """Return what other nodes may ask of this one: what is `wanted`, its blocks, and operations of its engines."""
        watches = {key: service for key, service in self.services.items() if key[1] is WatchBlocks}
        operations = {
            (worker.engine_name, message): service
            for worker in self.directory.local.values()
            for message, service in worker.services.items()
            if message in OPERATION_OF
        }
        return cast("dict[tuple[str, type[Message]], Service]", {**wanted, **watches, **operations})

    def lives(self) -> Iterable[tuple[str, CacheLife]]:
        """Yield the caches of its engines that are up, by the names of the workers, but those that nobody watches."""
        for number, name in enumerate(list(self.directory.local)[: len(self.system.engines)]):
            worker = self.directory.local[name]
            if worker.leg not in UNWATCHED and self.system.engines[number].current is not None:
                memory = self.system.hosts[number].scheduler.memory
                life = memory.events
                assert isinstance(life, CacheLife)
                assert len(life.there) == memory.referenced + memory.idle, "an engine does not tell of all its blocks"
                yield worker.full_name, life


def watches_on(directory: Directory, node: str, plan: PrefixPlan | None) -> tuple[int, int]:
    """Return how many streams a node has open at another one all the time, and how many it answers."""
    if plan is None:
        return 0, 0
    record = directory.node(node)
    others = sum(offer.leg not in UNWATCHED for offer in record.state.offers) if directory.routes else 0
    own = sum(worker.leg not in UNWATCHED for worker in directory.local.values()) if record.state.routes else 0
    return others, own


@define(eq=False)
class PrefixRouting:
    """The policy of one router with its index, and the subscriber that keeps it; without a plan, the least loaded."""

    plan: PrefixPlan | None
    directory: Directory
    lives: Callable[[], Iterable[tuple[str, CacheLife]]]  # of all workers
    index: PrefixIndex = field(factory=PrefixIndex)
    expected: ExpectedPrefixes = field(factory=ExpectedPrefixes)

    def __attrs_post_init__(self) -> None:
        if self.plan is not None:
            self.index = PrefixIndex(self.plan.settings.blocks_max)

    def policy(self) -> Policy:
        if self.plan is None:
            return least_loaded
        chance = self.plan.chance(f"policy {self.directory.name}").random
        policy = KvPolicy(self.plan.settings, self.index, chance, trio.current_time, self.expected)
        return CheckedPolicy(policy, self.plan.caches, self._life_of)

    def children(self) -> tuple[Tree | Child, ...]:
        if self.plan is None:
            return ()
        subscriber = PrefixSubscriber(ModelPool(self.directory, "tiny"), self.index)
        return (router_child.feed_child("tiny", "prefixes", subscriber),)

    def check(self) -> None:
        """Check that the index is what the caches are, when nothing happens."""
        if self.plan is not None:
            assert not len(self.expected), "a prompt is expected that no worker computes"
            self.plan.caches.check_index(self.index, self.lives())

    def _life_of(self, name: str) -> tuple[CacheLife, int] | None:
        assert self.plan is not None
        life = dict(self.lives()).get(name)
        return None if life is None else (life, self.plan.page_size)


@define(eq=False)
class PrefixSystem(PictureSystem):
    """A system that routes by prefix, if its seed has a plan for that."""

    prefixes: PrefixPlan | None = None
    far: bool = False  # the workers are on another node, behind a link
    publishers: NodePublishers = field(init=False)
    prefix_routing: PrefixRouting = field(init=False)

    def __attrs_post_init__(self) -> None:
        PictureSystem.__attrs_post_init__(self)
        if self.prefixes is not None:
            self.prefixes.apply(self.costs)

    @property
    def line_watches(self) -> int:
        return self.publishers.line_watches

    @property
    def front_watches(self) -> int:
        return self.workers if self.far and self.prefixes is not None else 0

    @property
    def guides(self) -> Sequence[str]:
        """The beginnings that prompts of several clients have in common."""
        return () if self.prefixes is None else GUIDES

    def cache_lives(self) -> Iterable[tuple[str, CacheLife]]:
        """Yield the prefix caches of all workers that are up, by their names."""
        return self.publishers.lives()

    def all_hosts(self) -> Iterator[Any]:  # of a `FakeHost` or a `LocalEngine`
        """Yield the hosts of all engines that are up."""
        yield from (host for number, host in self.hosts.items() if self.engines[number].live is not None)

    async def flush(self, after_s: float) -> None:
        """Flush the cache of one engine after a while, if it is idle then."""
        assert self.prefixes is not None
        await trio.sleep(after_s)
        if hosts := list(self.all_hosts()):
            host = self.prefixes.chance(f"flush {after_s}").choice(hosts)
            with suppress(Overloaded, EngineLost):
                engine = host if isinstance(host, SimulatedEngine) else host.engine
                await engine.operate(FlushCache())

    def heal_prefixes(self) -> None:
        """Spoil no more events."""
        if self.prefixes is not None:
            self.prefixes.spoiling.heal()

    async def wait_trusted(self) -> None:
        """Wait until every worker has been asked again for its blocks."""
        if self.prefixes is not None:
            await trio.sleep(self.prefixes.heals_s)
