"""A model of vectors under a seed: askers with many texts, who leave at any moment, and embedders that are lost.

Some of the embedders are on the asking node, the others at the ends of links that are cut. A vector depends on the ids
of its text alone, so one of another request, or of another place, is seen. At the end the embedders are well: a request
is computed, and no asker, slot, stream or item is left.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any, cast

import trio
from attrs import define, evolve, field

from actors.embedder import embedder
from actors.engines.embedding.embed_check import ITEMS_MAX
from actors.engines.embedding.limits import EmbedderLimits
from actors.engines.embedding.port import VectorsAnswer
from actors.engines.simulated.embedder import SimulatedEmbedder, vector
from actors.engines.simulated.spec import EncodingCosts, Faults
from actors.kit.groups import consists_of
from actors.routing.embedding import Embedding, EmbedWork
from actors.routing.route import FailoverLimits
from actors.routing.whole_work import FAILOVER
from protocol.errors import DeadlineExceeded, EngineDied, EngineRefused, EngineStuck, PeerLost, RequestError
from protocol.link.peer import Peer
from protocol.messages.cluster import Leg, NodeState, Offer
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, Pooling, TextItem, Vectors
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.token_ids import TokenIds
from supervisor.cluster.directory import Directory
from supervisor.cluster.engine_service import EngineService
from supervisor.cluster.model_pool import ModelPool
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.work import EmbedInbox, embed_inbox
from supervisor.links.link import Link
from supervisor.links.serving import Service
from supervisor.supervision.registration import Registration
from tests.rig.network import sim_pair
from tests.system.simulator.seed import traced

MODEL = "oak"
PROPERTIES = EmbeddingInfo(EmbeddingOutput.VECTORS, 4, Pooling.LAST, normalised=True, is_matryoshka=True)
INFO = EngineInfo("simulated", "1", 1000, 64, 4096, 64, 4, 16, honours_seed=True, embedding=PROPERTIES)
LIMITS = EmbedderLimits(computing_s=20.0, release_s=5.0)
FAULTY_S, QUIET_S = 40.0, 40.0  # the time with faults, and the longest time until all is released
ALLOWED = {error.code for error in (DeadlineExceeded, EngineRefused, *FAILOVER)}  # some use up their attempts


def item(rng: random.Random) -> TextItem:
    """Return a text of a few tokens."""
    return TextItem(TokenIds.of(rng.randrange(1000) for _ in range(rng.randint(1, 12))))


class Counted(SimulatedEmbedder):
    """An embedder that is never given more requests than it has slots."""

    def submit(self, request: Embed) -> VectorsAnswer:
        assert len(self._requests) < self.info.running_max, "a slot was free before its request was released"
        return super().submit(request)


@define(eq=False)
class Host:
    """One embedder in all its lives, and the link to it if it is on another node."""

    name: str
    here: Directory
    rng: random.Random
    is_far: bool
    info: EngineInfo = field(init=False)
    directory: Directory = field(init=False)
    worker: LocalWorker = field(init=False)
    inbox: EmbedInbox = field(init=False)
    faults: Faults = field(init=False)
    engine: SimulatedEmbedder | None = None
    transport: Any = None
    links: list[Link] = field(factory=list)
    seen: Counter[str] = field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        rng = self.rng
        self.info = evolve(INFO, running_max=rng.randint(1, 6))
        self.directory = Directory(self.name) if self.is_far else self.here
        address, self.inbox = embed_inbox(rng.randint(2, 40))
        registration: Registration[Any] = Registration(self.changed)
        self.worker = self.directory.local[self.name] = LocalWorker(
            node=self.directory.name,
            directory=self.directory,
            idle_offer=Offer(self.name, MODEL, Leg.EMBED, self.info.running_max, up=False),
            address=address,
            engine=registration,
            inbox=self.inbox,
        )
        self.faults = rng.choice(
            [Faults(), Faults(stuck=0.1), Faults(refuse=0.02), Faults(stall=0.1, stall_s=2.0), Faults(slow=4.0)]
        )

    def changed(self) -> None:
        """Notify its node, and announce it to the asking one."""
        self.directory.notify()
        if self.links:
            self.here.merge_state(self.name, NodeState((self.worker.offer,)))

    async def live(self) -> None:
        """Run one life of the embedder after another."""
        while True:
            engine = self.engine = Counted(
                self.info, 2, self.rng, EncodingCosts(fixed_s=0.05, per_item_s=0.002), self.faults
            )
            try:
                async with trio.open_nursery() as life:
                    await life.start(engine.run)
                    with self.worker.engine.publish(cast("Any", engine)):
                        await life.start(embedder, self.inbox, engine, self.info.running_max, LIMITS)
                        self.directory.reroute_queued()
                        await trio.sleep_forever()
            except BaseExceptionGroup as group:
                if not consists_of(group, EngineDied, EngineStuck):
                    raise
                self.seen["restart"] += 1
            self.worker.reroute_queued()
            await trio.sleep(self.rng.uniform(0.1, 3.0))

    async def link(self) -> None:
        """Keep a link to it, and another one whenever that is cut."""
        while True:
            near, far = sim_pair(self.rng, delay_s=0.01)
            asker = Link(near, Peer("here", serves_max=0))
            service = cast("Service", EngineService(self.worker).for_node("here"))
            server = Link(far, Peer(self.name, serves_max=64), {(self.name, Embed): service})
            self.transport = near
            try:
                async with trio.open_nursery() as ends:
                    ends.start_soon(asker.run)
                    ends.start_soon(server.run)
                    await asker.wait_ready()
                    self.links.append(asker)
                    self.here.linked(self.name, asker)
                    self.changed()
                    await trio.sleep_forever()
            except BaseExceptionGroup as group:
                if not consists_of(group, PeerLost):
                    raise
                self.seen["cut"] += 1
            finally:
                self.links.clear()
                self.here.unlinked(self.name, asker)
            await trio.sleep(self.rng.uniform(0.1, 2.0))

    async def suffer(self) -> None:
        """Crash, stall, and lose the link now and then."""
        while True:
            await trio.sleep(self.rng.expovariate(1 / 8))
            match self.rng.randrange(3):
                case 0 if self.engine is not None:
                    self.engine.crash()
                case 1 if self.engine is not None:
                    self.engine.stall(self.rng.uniform(0.5, 30.0))
                case _ if self.transport is not None:
                    self.transport.cut()

    def heal(self) -> None:
        """Inject no more faults, also in later lives."""
        self.faults = Faults()
        if self.engine is not None:
            self.engine.inject(self.faults)

    async def left(self) -> list[str]:
        """Return what it holds."""
        held = []
        if self.engine is None or await self.engine.load() != EngineLoad(0, 0, 0):
            held.append("items")
        if self.inbox.waiting != (0, 0) or self.worker.in_flight.requests:
            held.append("requests")
        return [f"{self.name} {each}" for each in held] + [
            f"{self.name} streams" for link in self.links if link.peer.asked
        ]


@define(eq=False)
class Run:
    """One run of a model of vectors."""

    rng: random.Random
    here: Directory = field(factory=lambda: Directory("here"))
    hosts: list[Host] = field(factory=list)
    outcomes: Counter[str] = field(factory=Counter)
    embedding: Embedding = field(init=False)

    def __attrs_post_init__(self) -> None:
        for number in range(self.rng.randint(1, 3)):
            self.hosts.append(Host(f"host-{number}", self.here, self.rng, is_far=self.rng.random() < 0.6))
        limits = FailoverLimits(resume_s=5.0)
        self.embedding = Embedding(ModelPool(self.here, MODEL), limits, lambda: f"{self.rng.getrandbits(128):032x}")

    async def traced(self) -> str:
        """Run, and return what happened."""
        async with trio.open_nursery() as living:
            for host in self.hosts:
                living.start_soon(host.live)
                if host.is_far:
                    living.start_soon(host.link)
            async with trio.open_nursery() as asking:
                with trio.move_on_after(FAULTY_S):
                    async with trio.open_nursery() as suffering:
                        for host in self.hosts:
                            suffering.start_soon(host.suffer)
                        for _ in range(self.rng.randint(8, 64)):
                            asking.start_soon(self.ask_often)
                for host in self.hosts:
                    host.heal()
            await self.at_rest()
            await self.probe()
            await self.at_rest()
            living.cancel_scope.cancel()
        seen = sum((host.seen for host in self.hosts), Counter())
        return f"{[host.is_far for host in self.hosts]} {sorted(self.outcomes.items())} {sorted(seen.items())}"

    async def ask_often(self) -> None:
        """Ask one request after another until the faults are over; leave some of them."""
        end = FAULTY_S - self.rng.uniform(0.0, 10.0)
        while trio.current_time() < end:
            await trio.sleep(self.rng.expovariate(1 / 2))
            number = self.rng.choice([1, 2, self.rng.randint(1, 256)])
            leaves = self.rng.random() < 0.3
            with trio.move_on_after(self.rng.expovariate(1 / 1.0) if leaves else 10_000) as asked:
                self.outcomes[await self.ask(number)] += 1
            self.outcomes["left"] += asked.cancelled_caught

    async def ask(self, number: int) -> str:
        """Ask for vectors, and return the outcome; a vector that is not its text's is an error."""
        items = [item(self.rng) for _ in range(number)]
        parts = tuple(tuple(items[start : start + ITEMS_MAX]) for start in range(0, number, ITEMS_MAX))
        dimensions = self.rng.choice([None, 2])
        work = EmbedWork("", parts, dimensions, self.rng.randrange(2), self.rng.choice(["alice", "bob", "carol"]))
        try:
            found = await self.embedding.vectors(work)
        except RequestError as error:
            if error.code not in ALLOWED:
                raise
            return error.code
        for part, vectors in zip(parts, found, strict=True):
            self.check(part, vectors, dimensions)
        return "ended"

    @staticmethod
    def check(part: tuple[TextItem, ...], vectors: Vectors, dimensions: int | None) -> None:
        """Compare the vectors of a part with those of its texts."""
        expected = b"".join(vector(each, PROPERTIES, dimensions).tobytes() for each in part)
        assert bytes(vectors.data.data) == expected, "the vectors of other texts"

    async def at_rest(self) -> None:
        """Wait until nothing is left of any request."""
        left: list[str] = ["no look yet"]
        with trio.move_on_after(QUIET_S):
            while left:
                await trio.sleep(0.5)
                left = []
                for host in self.hosts:
                    try:
                        left += await host.left()
                    except RequestError:
                        left.append(f"{host.name} is down")
                left += [worker.name for worker in self.here.all_workers() if worker.in_flight.own.requests]
        assert not left, left

    async def probe(self) -> None:
        """Ask for many vectors: nothing keeps them from being computed now."""
        with trio.fail_after(QUIET_S):
            assert await self.ask(256) == "ended"


@cache
def run_embedding_seed(seed: int, *, planned: bool = False) -> str:
    """Run one seed; return its trace. No faults are dealt to it: each seed draws its own."""
    del planned
    return traced(lambda rng: Run(rng).traced(), seed)
