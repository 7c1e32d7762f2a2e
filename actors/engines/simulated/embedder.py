"""The simulated embedder: batches of a stated duration, and vectors that depend on the ids of an item alone.

A batch has items of all running requests in turn, so that a short request passes a long one, up to a number of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import shake_256
from itertools import chain, islice, zip_longest
from math import fsum, inf, sqrt

import trio
from attrs import define, field

from actors.engines.embedding.embed_check import check_embed
from actors.engines.embedding.port import VectorsAnswer
from actors.engines.simulated.spec import EncodingCosts, FaultDraws, Faults
from actors.kit.calls import Answer
from protocol.errors import AskerLeft, EngineDied, EngineLost, EngineRefused, Overloaded
from protocol.messages.embedding import Embed, EmbeddingInfo, EmbeddingOutput, TextItem, Vectors
from protocol.messages.engine import EngineInfo, EngineLoad
from protocol.tensors import Dtype, Tensor

BATCH_TOKENS_MAX = 8192
"""The most tokens of one batch; a longer item is a batch alone."""

NUMBER_BYTES = 4


def vector(item: TextItem, embedding: EmbeddingInfo, dimensions: int | None = None, seed: int = 0) -> array[float]:
    """Return the vector of a text, or the score of a pair, from 0 to 1: a function of the ids and the seed."""
    hashed = shake_256(f"{seed} {item.second_at} ".encode() + item.tokens.packed)
    numbers = memoryview(hashed.digest(embedding.width * NUMBER_BYTES)).cast("I")
    if embedding.output is EmbeddingOutput.SCORES:
        return array("f", [number / 2**32 for number in numbers])
    first = [number / 2**31 - 1 for number in numbers[:dimensions]]
    if not embedding.normalised:
        return array("f", first)
    length = sqrt(fsum(number * number for number in first)) or 1.0
    return array("f", [number / length for number in first])


@define(eq=False)
class _Request:
    request: Embed
    answer: VectorsAnswer
    vectors: list[array[float]] = field(factory=list)  # of its first items
    computing: int = 0  # its items in the batch that is being computed
    aborted: bool = False
    stuck: bool = False

    @property
    def left(self) -> tuple[TextItem, ...]:
        """The items that no batch has had yet."""
        return self.request.items[len(self.vectors) + self.computing :]

    @property
    def batch(self) -> tuple[TextItem, ...]:
        """The items in the batch that is being computed."""
        begun = len(self.vectors)
        return self.request.items[begun : begun + self.computing]


@define(eq=False)
class SimulatedEmbedder:
    """One simulated embedder; implements `actors.engines.embedding.port.Embedder` while `run` runs.

    `info` has its limits and the properties of its vectors. `chance` draws the faults and nothing else. In virtual time
    the same calls give the same answers.
    """

    info: EngineInfo
    waiting_max: int  # requests
    chance: FaultDraws
    costs: EncodingCosts = EncodingCosts()
    faults: Faults = Faults()
    seed: int = 0
    _requests: dict[str, _Request] = field(init=False, factory=dict)  # all that are not released, in order
    _lost: trio.Event = field(init=False, factory=trio.Event)
    _alive: trio.CancelScope = field(init=False, factory=trio.CancelScope)
    _stalled_until: float = field(init=False, default=-inf)
    _changed: trio.lowlevel.ParkingLot = field(init=False, factory=trio.lowlevel.ParkingLot)

    # The port --------------------------------------------------------------------------

    def submit(self, request: Embed) -> VectorsAnswer:
        """Start a request; raises as `check_embed`, `Overloaded` with all places taken, `EngineLost` after the end."""
        if self._lost.is_set():
            raise EngineLost("the embedder has ended")
        check_embed(request, self.info)
        assert request.id not in self._requests, "an id that is in use"
        if len(self._requests) >= self.info.running_max + self.waiting_max:
            raise Overloaded(f"{self.waiting_max} requests wait")
        answer: VectorsAnswer = Answer(0)
        self._requests[request.id] = _Request(request, answer)
        self._changed.unpark_all()
        return answer

    def abort(self, request_id: str) -> None:
        """Stop a request: at once, or at the end of the batch that has items of it."""
        request = self._requests.get(request_id)
        if request is None or request.aborted:
            return
        request.aborted, request.stuck = True, self._happens(self.faults.stuck)
        self._release_aborted(request)

    async def wait_released(self, request_id: str) -> None:
        """Wait until the request is over."""
        await trio.lowlevel.checkpoint()
        if (request := self._requests.get(request_id)) is not None:
            await request.answer.over.wait()

    async def wait_lost(self) -> None:
        """Wait for the end of `run`, or for a crash."""
        await self._lost.wait()

    async def load(self) -> EngineLoad:
        """Return the numbers of items in the present batch and of others, and the tokens of the batch."""
        await trio.lowlevel.checkpoint()
        if self._lost.is_set():
            raise EngineLost("the embedder has ended")
        running = waiting = tokens = 0
        for each in self._requests.values():
            running += each.computing
            waiting += len(each.left)
            tokens += sum(len(item.tokens) for item in each.batch)
        return EngineLoad(running, waiting, tokens)

    # Faults on request -----------------------------------------------------------------

    def inject(self, faults: Faults) -> None:
        """Replace the injected faults; slower batches begin with the next one; stuck requests end if none may be."""
        self.faults = faults
        self._schedule_crash()
        for request in list(self._requests.values()):
            self._release_aborted(request)

    def stall(self, for_s: float) -> None:
        """Let no batch end for so long, from now on."""
        self._stalled_until = max(self._stalled_until, trio.current_time() + for_s)

    def crash(self) -> None:
        """Become lost at once: every answer fails, and `run` raises `EngineDied`."""
        self._end("the embedder crashed")
        self._alive.cancel()

    # The actor -------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute until cancelled, batch by batch; raises `EngineDied` after a crash."""
        self._schedule_crash()
        task_status.started()
        try:
            with self._alive:
                while True:
                    if batch := self._next_batch():
                        await self._compute(batch)
                    else:
                        await self._changed.park()
            self.crash()
            raise EngineDied("the embedder crashed")
        finally:
            self._end("the embedder was stopped")

    def _next_batch(self) -> list[_Request]:
        """Return the requests of the next batch, once for each of their next items in it."""
        batch: list[_Request] = []
        tokens = 0
        for request, item in self._in_turn():
            tokens += len(item.tokens)
            if batch and tokens > BATCH_TOKENS_MAX:
                break
            batch.append(request)
        for request in batch:
            request.computing += 1
        return batch

    def _in_turn(self) -> Iterator[tuple[_Request, TextItem]]:
        """Yield the next item of each running request, then the one behind it of each, and so on."""
        running = islice((each for each in self._requests.values() if not each.aborted), self.info.running_max)
        lines = [[(request, item) for item in request.left] for request in running]
        return (pair for pair in chain.from_iterable(zip_longest(*lines)) if pair is not None)

    async def _compute(self, batch: list[_Request]) -> None:
        requests = list(dict.fromkeys(batch))
        for request in requests:
            if not request.vectors and self._happens(self.faults.refuse):
                self._refuse(request)
        tokens = sum(len(item.tokens) for each in requests for item in each.batch)
        lasts_s = self.faults.slow * self.costs.batch_s(len(batch), tokens)
        if self._happens(self.faults.stall):
            lasts_s += self.faults.stall_s
        await trio.sleep(lasts_s)
        await trio.sleep_until(self._stalled_until)
        for request in requests:
            await self._add_vectors(request)

    async def _add_vectors(self, request: _Request) -> None:  # noqa: ASYNC910  # it has an item in the batch
        """Add the vectors of the present batch to a request, and end it with the last one."""
        embedding, asked = self.info.embedding, request.request
        assert embedding is not None  # the request has been checked
        for item in request.batch:
            await trio.lowlevel.checkpoint()  # a text may be long, and a vector too
            if request.aborted:
                break
            request.vectors.append(vector(item, embedding, asked.dimensions, self.seed))
            request.computing -= 1
        request.computing = 0
        if request.aborted:
            self._release_aborted(request)
        elif len(request.vectors) == len(asked.items):
            data = b"".join(row.tobytes() for row in request.vectors)
            shape = (len(request.vectors), len(request.vectors[0]))
            del self._requests[asked.id]
            request.answer.end(Vectors(Tensor(Dtype.FLOAT32, shape, memoryview(data))))

    def _refuse(self, request: _Request) -> None:
        """Find a request wrong that is in the present batch."""
        request.aborted = True
        del self._requests[request.request.id]
        request.answer.fail(EngineRefused("the embedder does not like it"))

    def _release_aborted(self, request: _Request) -> None:
        """End an aborted request that is in no batch, unless it is stuck."""
        ends = request.aborted and not request.computing and not (request.stuck and self.faults.stuck > 0)
        if ends and self._requests.pop(request.request.id, None) is not None:
            request.answer.fail(AskerLeft("aborted"))

    def _happens(self, share: float) -> bool:
        return share > 0 and self.chance.random() < share

    def _schedule_crash(self) -> None:
        after_s = self.faults.crash_after_s
        self._alive.deadline = inf if after_s is None else trio.current_time() + after_s

    def _end(self, why: str) -> None:
        """Become lost; the first reason counts."""
        self._lost.set()
        requests = list(self._requests.values())
        self._requests.clear()
        for request in requests:
            request.answer.fail(EngineLost(why))
