"""Encoders for tests, the items that they encode, and requests for them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, TypeVar

import trio
from attrs import define, evolve, field

from actors.encoder import encoder
from actors.engines.encoding.cache import EmbeddingCache
from actors.engines.encoding.limits import EncoderLimits, EncoderObserver
from actors.engines.encoding.port import BatchAnswer
from actors.engines.simulated.encoder import SimulatedEncoder, embed
from actors.engines.simulated.spec import EncodingCosts
from actors.kit.calls import Address, Answer
from actors.kit.priority_inbox import PriorityInbox
from actors.media.layout import VisionLayout
from protocol.errors import RequestError
from protocol.messages.engine import EngineInfo, EngineLoad, encoder_info
from protocol.messages.generation import REQUEST_ID_LENGTH
from protocol.messages.media import (
    EmbeddingBatch,
    Encode,
    EncodeBatch,
    Encoded,
    MediaForm,
    MediaInfo,
    MediaItem,
    Modality,
    grid_tokens,
)
from protocol.tensors import Dtype, Tensor
from supervisor.engines.work import encode_inbox

PATCH = 14  # the side of a patch, in pixels
IMAGE_TOKEN, VIDEO_TOKEN = 90, 91
MEDIA = MediaInfo(MediaForm.EMBEDDINGS, 8, Dtype.BFLOAT16, 2, IMAGE_TOKEN, VIDEO_TOKEN)


def image(name: str = "a", rows: int = 4, columns: int = 4, **changes: Any) -> MediaItem:
    """Return an image of so many patches; its pixels depend on its name, and a quarter as many tokens stand for it."""
    height, width = rows * PATCH, columns * PATCH
    data = random.Random(name).randbytes(height * width * 3)
    grid = (1, rows, columns)
    item = MediaItem(
        modality=Modality.IMAGE,
        digest=sha256(name.encode()).hexdigest(),
        grid=grid,
        tokens=grid_tokens(grid, MEDIA.merge),
        form=MediaForm.PIXELS,
        data=Tensor(Dtype.UINT8, (1, height, width, 3), memoryview(data)),
    )
    return evolve(item, **changes)


def video(name: str = "v", steps: int = 2) -> MediaItem:
    """Return a video of 4 x 4 patches and two frames a step."""
    height = width = 4 * PATCH
    data = random.Random(name).randbytes(2 * steps * height * width * 3)
    return MediaItem(
        modality=Modality.VIDEO,
        digest=sha256(name.encode()).hexdigest(),
        grid=(steps, 4, 4),
        tokens=grid_tokens((steps, 4, 4), MEDIA.merge),
        form=MediaForm.PIXELS,
        data=Tensor(Dtype.UINT8, (2 * steps, height, width, 3), memoryview(data)),
        seconds_per_grid=1.0,
    )


async def embedded(item: MediaItem, media: MediaInfo = MEDIA) -> MediaItem:
    """Return an item with the embeddings that a simulated encoder makes of it."""
    return evolve(item, form=MediaForm.EMBEDDINGS, data=await embed(item, media))


def embeddings(name: str = "a", media: MediaInfo = MEDIA, **changes: Any) -> MediaItem:
    """Return an image with embeddings that no encoder has made."""
    item = image(name)
    data = random.Random(name).randbytes(item.tokens * media.width * 2)
    tensor = Tensor(Dtype.BFLOAT16, (item.tokens, media.width), memoryview(data))
    return evolve(item, form=MediaForm.EMBEDDINGS, data=tensor, **changes)


@define(eq=False)
class NotingEncoder(SimulatedEncoder):
    """A simulated encoder that takes a second for a batch, and records which batches it was given."""

    batches: list[list[str]] = field(factory=list, kw_only=True)  # the digests of the items of each
    aborts: list[str] = field(factory=list, kw_only=True)

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        answer = super().submit(batch)
        self.batches.append([item.digest for item in batch.items])
        return answer

    def abort(self, batch_id: str) -> None:
        if batch_id in self._batches:
            self.aborts.append(batch_id)
        super().abort(batch_id)


@define(eq=False)
class EncoderByHand:
    """An encoder whose batches a test ends by hand; it never lets go of one by itself."""

    refuses: RequestError | None = None
    batches: list[list[str]] = field(factory=list)
    aborts: list[str] = field(factory=list)
    info: EngineInfo = encoder_info("hand", "1", MEDIA, 8)
    lost: trio.Event = field(factory=trio.Event)
    _answers: dict[str, BatchAnswer] = field(factory=dict)

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        if self.refuses is not None:
            raise self.refuses
        self.batches.append([item.digest for item in batch.items])
        answer = self._answers[batch.id] = Answer(0)
        return answer

    def end(self, result: EmbeddingBatch) -> None:
        """End the batch that is being computed."""
        self._answers.popitem()[1].end(result)

    def abort(self, batch_id: str) -> None:
        if batch_id in self._answers:
            self.aborts.append(batch_id)

    async def wait_released(self, batch_id: str) -> None:
        await trio.lowlevel.checkpoint()
        if (answer := self._answers.get(batch_id)) is not None:
            await answer.over.wait()

    async def wait_lost(self) -> None:
        await self.lost.wait()

    async def load(self) -> EngineLoad:
        await trio.lowlevel.checkpoint()
        return EngineLoad(len(self._answers), 0, 0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()


COSTS = EncodingCosts(fixed_s=1.0, per_item_s=0.0, per_token_s=0.0)


SomeEncoder = TypeVar("SomeEncoder", bound=SimulatedEncoder | EncoderByHand)


@asynccontextmanager
async def running_encoder(engine: SomeEncoder) -> AsyncIterator[SomeEncoder]:
    """Run an encoder while the body runs."""
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        yield engine
        nursery.cancel_scope.cancel()


def noting_encoder(batch_max: int = 8, costs: EncodingCosts = COSTS) -> NotingEncoder:
    """Return an encoder whose batches take a second."""
    return NotingEncoder(MEDIA, batch_max, random.Random(0), costs)


@define(eq=False)
class Noting(EncoderObserver):
    """Records what an encoder reports."""

    requests: list[str] = field(factory=list)
    waits: list[float] = field(factory=list)
    batches: list[tuple[int, str, float]] = field(factory=list)
    aborts: list[float] = field(factory=list)
    queue: tuple[int, int] = (0, 0)  # items that wait, and that are computed

    def queue_changed(self, waiting: int, computing: int) -> None:
        self.queue = waiting, computing

    def request_ended(self, modality: str, outcome: str) -> None:
        self.requests.append(f"{modality} {outcome}")

    def waited(self, seconds: float) -> None:
        self.waits.append(seconds)

    def batch_ended(self, items: Any, outcome: str, seconds: float) -> None:
        self.batches.append((len(items), outcome, seconds))

    def aborted(self, seconds: float) -> None:
        self.aborts.append(seconds)


def encode(item: MediaItem | str = "a", request_id: str = "r", owner: str = "alice", **more: Any) -> Encode:
    """Return a request for the embeddings of an item, or of an image of a name."""
    return Encode(request_id, image(item) if isinstance(item, str) else item, owner=owner, **more)


@define(eq=False)
class EncoderRig:
    """An encoder actor and its engine."""

    engine: NotingEncoder | EncoderByHand
    address: Address[Encode, Encoded, Encoded]
    inbox: PriorityInbox[Encode, Encoded, Encoded]
    cache: EmbeddingCache
    observer: Noting
    results: dict[str, Encoded] = field(factory=dict)  # by request id
    times: dict[str, float] = field(factory=dict)

    async def ask(self, item: MediaItem | str = "a", request_id: str = "", **more: Any) -> Encoded:
        """Ask for one item; its result is recorded under the request's id, which is the item's name by default."""
        request_id = request_id or (item if isinstance(item, str) else item.digest)
        async with self.address.ask(encode(item, request_id, **more), 0) as answer:
            result = await answer.result()
        assert result is not None
        self.results[request_id], self.times[request_id] = result, trio.current_time()
        return result

    @property
    def names(self) -> list[str]:
        """The batches that the engine was given, with the first letters of names for digests."""
        letters = {sha256(name.encode()).hexdigest(): name for name in map(chr, range(97, 123))}
        return ["".join(letters.get(digest, "?") for digest in batch) for batch in self.engine.batches]


@asynccontextmanager
async def encoder_rig(
    engine: NotingEncoder | EncoderByHand | None = None,
    slots: int = 64,
    layout: VisionLayout | None = None,
    **limits: Any,
) -> AsyncIterator[EncoderRig]:
    """Run an encoder actor and its engine while the body runs."""
    engine, observer = engine or noting_encoder(), Noting()
    address, inbox = encode_inbox(64)
    chosen = EncoderLimits(**({"batch_wait_s": 0.5} | limits))
    cache = EmbeddingCache(chosen.cache_bytes_max)
    async with running_encoder(engine), trio.open_nursery() as nursery:
        await nursery.start(encoder, inbox, engine, slots, chosen, cache, observer, layout)
        yield EncoderRig(engine, address, inbox, cache, observer)
        nursery.cancel_scope.cancel()


def new_id(number: int) -> str:
    """Return a request id as those of other nodes must be."""
    return f"{number:0{REQUEST_ID_LENGTH}x}"
