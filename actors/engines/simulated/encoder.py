"""The simulated encoder: batches of a stated duration, and embeddings that depend on the pixels alone."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256, shake_256
from math import inf

import trio
from attrs import define, evolve, field

from actors.engines.encoding.port import BatchAnswer
from actors.engines.media_check import check_pixels
from actors.engines.simulated.spec import EncodingCosts, FaultDraws, Faults
from actors.kit.calls import Answer
from protocol.errors import AskerLeft, BadRequest, EngineDied, EngineLost, EngineRefused, Overloaded, RequestError
from protocol.messages.engine import EngineInfo, EngineLoad, encoder_info
from protocol.messages.media import EmbeddingBatch, EmbeddingOutcome, EncodeBatch, MediaForm, MediaInfo, MediaItem
from protocol.model_folder import Digest
from protocol.tensors import BYTES, Dtype, Tensor

WAITING_MAX = 4  # batches
HASHED_BYTES, ROWS = 1024 * 1024, 256  # bytes hashed and rows drawn in one turn of the event loop

# The highest byte of an element, by its dtype: the mask of the drawn bits, and the bits that are set. So every element
# is a number of an absolute value from 0.5 to 2.
_HIGH_BYTES = {Dtype.BFLOAT16: (0x80, 0x3F), Dtype.FLOAT16: (0x83, 0x3C), Dtype.FLOAT32: (0x80, 0x3F)}


async def embed(item: MediaItem, media: MediaInfo) -> Tensor:
    """Return the embeddings of an item, which are a function of its pixels and its grid."""
    hashed, pixels = sha256(repr((item.modality.value, item.grid)).encode()), item.data.data
    for start in range(0, len(pixels), HASHED_BYTES):
        hashed.update(pixels[start : start + HASHED_BYTES])
        await trio.lowlevel.checkpoint()
    key, size = hashed.digest(), BYTES[media.dtype]
    keep, fixed = _HIGH_BYTES[media.dtype]
    table = bytes((byte & keep) | fixed for byte in range(256))
    data = bytearray()
    for row in range(item.tokens):
        drawn = bytearray(shake_256(key + row.to_bytes(8)).digest(media.width * size))
        drawn[size - 1 :: size] = drawn[size - 1 :: size].translate(table)
        data += drawn
        if not row % ROWS:
            await trio.lowlevel.checkpoint()
    return Tensor(media.dtype, (item.tokens, media.width), memoryview(data).toreadonly())  # noqa: ASYNC910  # an item has a row


@define(eq=False)
class _Batch:
    request: EncodeBatch
    answer: BatchAnswer
    aborted: bool = False
    stuck: bool = False


@define(eq=False)
class SimulatedEncoder:
    """One simulated encoder; implements `actors.engines.encoding.port.Encoder` while `run` runs.

    `chance` draws the faults and nothing else. In virtual time the same calls give the same answers.
    """

    media: MediaInfo
    batch_max: int
    chance: FaultDraws
    costs: EncodingCosts = EncodingCosts()
    faults: Faults = Faults()
    digest: Digest = ()
    _batches: OrderedDict[str, _Batch] = field(init=False, factory=OrderedDict)  # all batches that are not released
    _computing: _Batch | None = field(init=False, default=None)
    _lost: trio.Event = field(init=False, factory=trio.Event)
    _alive: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    _stalled_until: float = field(init=False, default=-inf)
    _changed: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    # The port --------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """The encoder's kind, version, and embeddings."""
        media = evolve(self.media, form=MediaForm.EMBEDDINGS)
        return encoder_info("simulated", "1", media, self.batch_max, self.digest)

    def submit(self, batch: EncodeBatch) -> BatchAnswer:
        """Start a batch; raises `BadRequest`, `Overloaded` with all places taken, `EngineLost` after the end."""
        if self._lost.is_set():
            raise EngineLost("the encoder has ended")
        if not 0 < len(batch.items) <= self.batch_max:
            raise BadRequest(f"a batch has 1 to {self.batch_max} items, not {len(batch.items)}")
        assert batch.id not in self._batches, "an id that is in use"
        if len(self._batches) - (self._computing is not None) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} batches wait")
        answer: BatchAnswer = Answer(0)
        self._batches[batch.id] = _Batch(batch, answer)
        self._changed.unpark_all()
        return answer

    def abort(self, batch_id: str) -> None:
        """Stop a batch: a waiting one at once, the running one at its end."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.aborted:
            return
        batch.aborted, batch.stuck = True, self._happens(self.faults.stuck)
        if batch is not self._computing:
            self._release(batch)

    async def wait_released(self, batch_id: str) -> None:
        """Wait until the batch is over."""
        await trio.lowlevel.checkpoint()
        if (batch := self._batches.get(batch_id)) is not None:
            await batch.answer.over.wait()

    async def wait_lost(self) -> None:
        """Wait for the end of `run`, or for a crash."""
        await self._lost.wait()

    async def load(self) -> EngineLoad:
        """Return the numbers of running and waiting items; raises `EngineLost` after the end."""
        await trio.lowlevel.checkpoint()
        if self._lost.is_set():
            raise EngineLost("the encoder has ended")
        running = 0 if self._computing is None else len(self._computing.request.items)
        return EngineLoad(running, sum(len(batch.request.items) for batch in self._batches.values()) - running, 0)

    # Faults on request -----------------------------------------------------------------

    def inject(self, faults: Faults) -> None:
        """Replace the injected faults; slower batches begin with the next one, and stuck ones end if none may be."""
        self.faults = faults
        self._schedule_crash()
        for batch in list(self._batches.values()):
            if batch.aborted and batch is not self._computing:
                self._release(batch)

    def stall(self, for_s: float) -> None:
        """Let no batch end for so long, from now on."""
        self._stalled_until = max(self._stalled_until, trio.current_time() + for_s)

    def crash(self) -> None:
        """Become lost at once: every answer fails, and `run` raises `EngineDied`."""
        self._end("the encoder crashed")
        self._alive.cancel()

    # The actor -------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute until cancelled, batch by batch; raises `EngineDied` after a crash."""
        self._schedule_crash()
        task_status.started()
        try:
            with self._alive:
                while True:
                    batch = next((batch for batch in self._batches.values() if not batch.aborted), None)
                    if batch is None:
                        await self._changed.park()
                    else:
                        await self._compute(batch)
            self.crash()
            raise EngineDied("the encoder crashed")
        finally:
            self._end("the encoder was stopped")

    async def _compute(self, batch: _Batch) -> None:
        items, self._computing = batch.request.items, batch
        lasts_s = self.faults.slow * self.costs.batch_s(len(items), sum(item.tokens for item in items))
        if self._happens(self.faults.stall):
            lasts_s += self.faults.stall_s
        await trio.sleep(lasts_s)
        await trio.sleep_until(self._stalled_until)
        outcomes = [] if batch.aborted else [await self._outcome(item) for item in items]
        self._computing = None
        if batch.aborted:
            self._release(batch)
        else:
            del self._batches[batch.request.id]
            batch.answer.end(EmbeddingBatch(tuple(outcomes)))

    async def _outcome(self, item: MediaItem) -> EmbeddingOutcome:
        try:
            check_pixels(item, self.media)
            if self._happens(self.faults.refuse):
                raise EngineRefused("the encoder does not like it")
            return EmbeddingOutcome(await embed(item, self.media))
        except RequestError as error:
            return EmbeddingOutcome(code=error.code, detail=error.detail)  # noqa: ASYNC910  # its caller waits

    def _release(self, batch: _Batch) -> None:
        """End an aborted batch, unless it is stuck."""
        if not (batch.stuck and self.faults.stuck > 0):
            del self._batches[batch.request.id]
            batch.answer.fail(AskerLeft("aborted"))

    def _happens(self, share: float) -> bool:
        return share > 0 and self.chance.random() < share

    def _schedule_crash(self) -> None:
        after_s = self.faults.crash_after_s
        self._alive.deadline = inf if after_s is None else trio.current_time() + after_s

    def _end(self, why: str) -> None:
        """Become lost; the first reason counts."""
        self._lost.set()
        batches = list(self._batches.values())
        self._batches.clear()
        for batch in batches:
            batch.answer.fail(EngineLost(why))
