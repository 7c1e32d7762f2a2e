"""The ports of the media actor: hosts and decoders of the simulator, which may be slow, hang, fail and die."""

from __future__ import annotations

import random
from hashlib import sha256
from math import inf

import trio
from attrs import Factory, define, field

from actors.media.jobs import Facts, ImageFacts, VideoFacts
from actors.media.media import (
    Allowance,
    Inspected,
    MediaPorts,
    MediaStatistics,
    PreparationLimits,
    Preparations,
    Source,
)
from actors.media.planning import Plan
from protocol.errors import BadRequest, NotReady
from protocol.messages.media import Modality
from protocol.tensors import Tensor
from tests.system.simulator.encoders import Gallery
from tests.system.simulator.pictures import FPS, LAYOUT, Picture, pixels, read

READY_WITHIN_S = 2.0  # decoders that are being started again
LARGE_BYTES = 2**30
LIMITS = PreparationLimits(
    items_max=8,
    tokens_max=2000,
    prepare_s=20.0,
    fetched_bytes_max=2**26,
    prepared_bytes_max=10**6,
    fetches_max=16,
    decodes_max=16,
    waiting_max=256,
)


@define(eq=False)
class SimContent:
    """What a URL led to."""

    picture: Picture
    media: SimMedia
    size_bytes: int
    closed: bool = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.media.gallery.held[self.picture.name] -= 1


@define(eq=False)
class SimMedia:
    """The hosts and the decoders of one gateway's node, and what is held of their pictures."""

    rng: random.Random
    gallery: Gallery
    limits: PreparationLimits = LIMITS
    delay_s: float = 0.0  # of a host, and of a decoder
    hosts_stall_until: float = -inf
    decoders_dead_until: float = -inf
    preparations: Preparations[SimContent] = field(init=False)
    _deaths: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot)
    _tensors: dict[int, tuple[Tensor, str]] = Factory(dict)

    def __attrs_post_init__(self) -> None:
        ports = MediaPorts(self._source, self._fetch, self._inspect, self._decode, self._release)
        self.preparations = Preparations({"tiny": LAYOUT}, ports, self.limits, lambda *_: None)

    def kill_decoders(self, for_s: float) -> None:
        """Let all decoders die, and none start for a while."""
        self.decoders_dead_until = trio.current_time() + for_s
        self._deaths.unpark_all()

    def heal(self) -> None:
        """Remove all faults; everything is quick from now on."""
        self.delay_s = 0.0
        self.hosts_stall_until = self.decoders_dead_until = -inf
        self.preparations._fetched.waiting_max = LIMITS.waiting_max  # noqa: SLF001  # nothing changes it in the product

    def check_free(self) -> None:
        """Check that nothing is held of any request, and that nothing waits."""
        assert not +self.gallery.held, f"media are held: {+self.gallery.held}"
        assert not self._tensors, "a tensor is held"
        numbers: MediaStatistics = self.preparations.statistics()
        for budget in (numbers.fetched_bytes, numbers.prepared_bytes, numbers.fetches, numbers.decodes):
            assert (budget.taken, budget.waiting) == (0, 0), "a budget of media is not free"

    # The ports -------------------------------------------------------------------------------

    def _source(self, url: str) -> Source:
        return Source(len(url), is_remote=read(url).remote)

    async def _fetch(self, url: str, _: Allowance) -> SimContent:
        picture = read(url)
        await trio.lowlevel.checkpoint()
        if picture.remote:
            await trio.sleep(self.rng.expovariate(1 / self.delay_s) if self.delay_s else 0.0)
            await trio.sleep_until(self.hosts_stall_until)
            if picture.trouble == "slow":
                await trio.sleep(1.0)
            elif picture.trouble == "hangs":
                await trio.sleep_forever()
            elif picture.trouble == "gone":
                raise BadRequest("the server of the URL ended the connection")
        self.gallery.held[picture.name] += 1
        return SimContent(picture, self, LARGE_BYTES if picture.trouble == "grows" else len(url))

    async def _inspect(self, content: SimContent, modality: Modality) -> Inspected[SimContent]:
        picture = content.picture
        await self._decoder(picture)
        if picture.trouble in {"torn", "gone"}:
            raise BadRequest(f"the {modality} cannot be read: it is torn")
        height, width = picture.height, picture.width
        facts: Facts = ImageFacts(height, width)
        if picture.frames:
            facts = VideoFacts(height, width, picture.frames, FPS)
        return Inspected(content, sha256(picture.line.encode()).hexdigest(), facts)

    async def _decode(self, content: SimContent, plan: Plan) -> Tensor:
        picture = content.picture
        await self._decoder(picture)
        if picture.trouble in {"crashes", "lies"}:
            raise BadRequest(f"the {plan.item.modality} cannot be read: its decoder {picture.trouble}")
        self.gallery.add(plan.item, picture)
        tensor = pixels(picture.line, plan.task.frames or (0,), *plan.shape[1:3])
        self.gallery.held[picture.name] += 1
        self._tensors[id(tensor)] = tensor, picture.name
        return tensor

    def _release(self, tensor: Tensor) -> None:
        _, name = self._tensors.pop(id(tensor))
        self.gallery.held[name] -= 1

    async def _decoder(self, picture: Picture) -> None:
        """Wait for a decoder, and for the time that it takes; raises `NotReady` if it dies meanwhile."""
        if self.decoders_dead_until - trio.current_time() > READY_WITHIN_S:
            await trio.sleep(READY_WITHIN_S)
            raise NotReady("the media decoders are starting")
        await trio.sleep_until(self.decoders_dead_until)
        lasts_s = self.rng.random() * self.delay_s
        lasts_s += {"slow": 1.0, "hangs": inf}.get(picture.trouble, 0.0)
        with trio.move_on_after(lasts_s):
            await self._deaths.park()
            raise NotReady("the media decoders were lost")
