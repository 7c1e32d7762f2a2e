"""The encoders of a node: the product's simulated ones and the actor that gives them batches."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import Any

import trio
from attrs import Factory, define, evolve, field

from actors.encoder import encoder
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits
from actors.engines.encoding.port import BatchAnswer, Encoder
from actors.engines.simulated.encoder import SimulatedEncoder
from actors.engines.simulated.spec import EncodingCosts, Faults
from protocol.errors import StartFailed
from protocol.messages.cluster import Leg, Offer
from protocol.messages.media import EmbeddingOutcome, Encode, EncodeBatch, MediaItem
from protocol.tensors import NO_TENSOR
from supervisor.cluster.directory import Directory
from supervisor.cluster.operations import encoder_services
from supervisor.cluster.workers import LocalWorker
from supervisor.engines.work import EncodeInbox, encode_inbox
from supervisor.links.serving import under_name
from supervisor.supervision.registration import Registration
from supervisor.supervision.tree import Backoff, Child, Strategy, Tree
from tests.rig.vision import MEDIA_INFO
from tests.system.simulator.model import TENANTS
from tests.system.simulator.pictures import LAYOUT, Picture, rows

INBOX_SIZE = 4
QUICK = EncodingCosts(fixed_s=0.01, per_item_s=0.0, per_token_s=0.0)


@define(eq=False)
class Gallery:
    """The pictures that were prepared in one run, by their digests of each salt, and those that nobody wants any more."""

    pictures: dict[str, Picture] = Factory(dict)
    held: Counter[str] = Factory(Counter)  # contents and tensors on gateways' nodes, by the name of their picture
    gone: set[str] = Factory(set)  # names

    def add(self, item: MediaItem, picture: Picture) -> None:
        """Hang up the picture of an item."""
        self.pictures |= {item.salted(salt).digest: picture for salt in TENANTS}


@define
class EncoderCosts:
    """Sizes, prices and faults of the encoders of one node; they may change while they run."""

    slots: int = 4
    prices: EncodingCosts = EncodingCosts(fixed_s=0.05, per_item_s=0.01, per_token_s=0.0)
    limits: EncoderLimits = EncoderLimits(batch_wait_s=0.01, waiting_s=8.0, batch_s=4.0, release_s=1.0)
    wrong: bool = False  # returns embeddings of other sizes

    def heal(self) -> None:
        """Remove all faults; encoders that start are quick from now on."""
        self.wrong, self.prices = False, QUICK


@define(eq=False)
class SimEncoder(SimulatedEncoder):
    """A simulated encoder that checks which batches it gets, and may return wrong embeddings."""

    live: EncoderCosts = field(kw_only=True)
    gallery: Gallery = field(kw_only=True)
    sizes: list[int] = field(factory=list, kw_only=True)  # of its batches

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        for item in batch.items:
            assert self.gallery.pictures[item.digest].name not in self.gallery.gone, "a picture is encoded for nobody"
        self.sizes.append(len(batch.items))
        return super().submit(batch)

    @property
    def held(self) -> int:
        """The number of batches that it holds."""
        return len(self._batches)

    @property
    def stalled(self) -> bool:
        """Whether no batch ends."""
        return self._stalled_until > trio.current_time()

    async def _compute(self, batch: Any) -> None:
        if any(self.gallery.pictures[item.digest].trouble == "kills" for item in batch.request.items):
            self.crash()
        await super()._compute(batch)

    async def _outcome(self, item: MediaItem) -> EmbeddingOutcome:
        outcome = await super()._outcome(item)
        if not self.live.wrong or outcome.code:
            return outcome
        rows = item.tokens + (1 if self.chance.random() < 0.5 else -1)
        size = rows * MEDIA_INFO.width * 4
        data = evolve(outcome.data, shape=(rows, MEDIA_INFO.width), data=memoryview(bytes(size)))
        return EmbeddingOutcome(data if rows else NO_TENSOR)


@define(eq=False)
class NodeEncoders:
    """The encoders of one node in one of its processes, offered as `supervisor.engines.children` does."""

    directory: Directory
    count: int
    costs: EncoderCosts
    gallery: Gallery
    chance: Any
    starts_fail: bool = False
    registrations: list[Registration[Encoder]] = Factory(list)
    inboxes: list[EncodeInbox] = Factory(list)
    engines: dict[int, SimEncoder] = Factory(dict)  # the latest of each
    _workers: list[LocalWorker] = Factory(list)
    _caches: list[EmbeddingCache] = Factory(list)

    def __attrs_post_init__(self) -> None:
        for offer in self.offers(self.directory.name, self.count, self.costs):
            registration: Registration[Encoder] = Registration(self.directory.notify)
            address, inbox = encode_inbox(INBOX_SIZE)
            cache = EmbeddingCache(self.costs.limits.cache_bytes_max)
            worker = LocalWorker(
                node=self.directory.name,
                idle_offer=offer,
                address=address,
                engine=registration,
                inbox=inbox,
                directory=self.directory,
                services=under_name(offer.name, encoder_services(offer.name, registration, cache)),
            )
            self.directory.local[offer.name] = worker
            self._workers.append(worker)
            self.registrations.append(registration)
            self.inboxes.append(inbox)
            self._caches.append(cache)

    @staticmethod
    def offers(node: str, count: int, costs: EncoderCosts) -> list[Offer]:
        """Return what a node offers of its encoders before they are up."""
        return [Offer(f"{node}-encoder-{number}", "tiny", Leg.ENCODE, costs.slots, up=False) for number in range(count)]

    def trees(self) -> tuple[Tree, ...]:
        """Return the children that run them."""
        return tuple(
            Tree(
                name=f"encoder {number}",
                strategy=Strategy.ONE_FOR_ALL,
                children=(
                    Child(name="engine", run=self._engine, args=(number,)),
                    Child(name="encoder", run=self._encoder, args=(number,)),
                ),
                restarts_max=None,
                backoff=Backoff(min_s=0.1, max_s=1.0, reset_after_s=5.0, crashes=True),
                needs=(),
            )
            for number in range(self.count)
        )

    async def _engine(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        if self.starts_fail:
            raise StartFailed("it does not start")
        costs, limits = self.costs.prices, self.costs.limits
        engine = self.engines[number] = SimEncoder(
            MEDIA_INFO, limits.batch_max, self.chance, costs, live=self.costs, gallery=self.gallery
        )
        with self.registrations[number].publish(engine):
            await engine.run(task_status=task_status)

    async def _encoder(self, number: int, *, task_status: trio.TaskStatus[None]) -> None:
        engine = await self.registrations[number].wait()
        self.directory.reroute_queued()
        try:
            cache = self._caches[number]
            cache.clear()
            own = self.inboxes[number], engine, self.costs.slots, self.costs.limits, cache, None, LAYOUT
            await encoder(*own, task_status=task_status)
        finally:
            self._workers[number].reroute_queued()

    def heal(self) -> None:
        """Remove all faults; encoders are quick from now on."""
        self.costs.heal()
        self.starts_fail = False
        for engine in self.engines.values():
            engine.inject(Faults())
            engine.costs = QUICK
            if engine.stalled:
                engine.crash()

    async def check_serves(self) -> None:
        """Check that all slots of each encoder can be taken at once, and that each item gets its own embeddings."""
        for worker, inbox in zip(self._workers, self.inboxes, strict=True):
            async with trio.open_nursery() as nursery:
                for number in range(self.costs.slots):
                    nursery.start_soon(self._check_encoded, worker, number)
                await trio.sleep(0.001)
                assert inbox.waiting == (0, 0), "a slot of an encoder is lost"

    async def _check_encoded(self, worker: LocalWorker, number: int) -> None:
        picture = Picture(f"probe of {worker.full_name} {number}", 4, 4)
        item = evolve(picture.item, digest=sha256(picture.name.encode()).hexdigest())
        self.gallery.add(item, picture)
        async with worker.ask(Encode(f"{number:032x}", item), 0) as answer:
            encoded = await answer.result()
        assert encoded is not None
        assert rows(encoded.item) == rows(item), "other embeddings than of this picture"

    def check_idle(self) -> None:
        """Check that every encoder is up and holds nothing."""
        for number, engine in self.engines.items():
            assert self.registrations[number].current is engine, "an encoder is down"
            assert not engine.held, "an encoder holds a batch"
        for inbox in self.inboxes:
            assert inbox.waiting == (0, 0), "an item waits for an encoder"
        for worker in self._workers:
            assert (worker.load.busy, worker.load.tokens) == (0, 0), "an encoder counts an item that is over"
