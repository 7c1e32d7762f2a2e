"""The host of an encoder of any kind: a vision tower in a process of its own, which answers its node over a link.

One batch is computed at a time, in a thread, so that the link is answered meanwhile. An abandoned batch ends after its
current item: nothing can interrupt an item. A wrong item fails alone. The host may decide nothing about a request:
batches, caches and deadlines are the node's. asyncio stays in this folder.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from attrs import define, field

from actors.engines.host.liveness import LivenessProbe, thread_of
from actors.engines.host.served_link import ServedLink, last_line
from actors.engines.host.watchdog import Watchdog
from protocol.errors import AskerLeft, EngineRefused, InternalError, Overloaded
from protocol.link.frames import Cancel, Frame, Open
from protocol.link.peer import Peer
from protocol.messages.engine import EngineInfo, EngineLoad, GetInfo, GetLoad, Ping
from protocol.messages.kind import Message
from protocol.messages.media import BATCHES_MAX, EmbeddingBatch, EmbeddingOutcome, EncodeBatch, MediaItem

STREAMS_BESIDE = 16  # streams of control operations
STREAMS_MAX = BATCHES_MAX + STREAMS_BESIDE


class Tower(Protocol):
    """Computes the embeddings of a batch, called in a thread of its own."""

    def encode(self, items: Sequence[MediaItem], is_wanted: Callable[[], bool]) -> Sequence[EmbeddingOutcome]:
        """Return one outcome an item, in their order; fewer once the batch `is_wanted` no more."""


@define(eq=False)
class _Batch:
    stream: int
    items: tuple[MediaItem, ...]
    left: bool = False

    def is_wanted(self) -> bool:
        return not self.left


@define(eq=False)
class EncoderHost:
    """Serves one link from one vision tower."""

    tower: Tower
    info: EngineInfo
    peer: Peer
    link: socket.socket
    watchdog: Watchdog
    served: ServedLink = field(init=False)
    _waiting: deque[_Batch] = field(factory=deque)
    _computing: _Batch | None = None
    _changed: asyncio.Event = field(factory=asyncio.Event)
    _thread: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "tower"))
    _liveness: LivenessProbe = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.served = ServedLink(self.link, self.peer, self.watchdog, self._received)

    async def serve(self) -> str:
        """Answer the node until its Bye, or until batches have failed too often, and return the reason."""
        loop = asyncio.get_running_loop()
        for handled in (signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(handled, self.watchdog.end, handled.name)
        own, thread = os.getpid(), await loop.run_in_executor(self._thread, threading.get_native_id)
        self._liveness = LivenessProbe(self._thread_answers, [thread_of(own, thread)], processes=[own])
        computing, serving = loop.create_task(self._compute()), loop.create_task(self.served.serve())
        await asyncio.wait({computing, serving}, return_when=asyncio.FIRST_COMPLETED)
        return serving.result() if serving.done() else computing.result()

    async def _thread_answers(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, int)

    def _received(self, frame: Frame) -> None:
        match frame:
            case Open():
                request = self.served.request(frame)
                if isinstance(request, EncodeBatch):
                    self._opened(_Batch(frame.stream, request.items))
                elif request is not None:
                    self.served.control(frame.stream, request, self._controlled)
            case Cancel():
                self._left(frame.stream)
            case _:
                pass

    async def _controlled(self, request: Message) -> Message:
        match request:
            case GetInfo():
                return self.info
            case Ping():
                return await self._liveness.probe(lambda: self._computing is not None)
            case GetLoad():
                running = 0 if self._computing is None else len(self._computing.items)
                return EngineLoad(running, sum(len(batch.items) for batch in self._waiting), 0)
            case _:
                raise EngineRefused(f"this encodes images and videos, and answers no {type(request).__name__}")

    # Batches -----------------------------------------------------------------------------

    def _opened(self, batch: _Batch) -> None:
        if not 1 <= len(batch.items) <= self.info.running_max:
            error = EngineRefused(f"a batch has 1 to {self.info.running_max} items, not {len(batch.items)}")
            self.served.fail(batch.stream, error)
        elif len(self._waiting) + (self._computing is not None) >= BATCHES_MAX:
            self.served.fail(batch.stream, Overloaded(f"{BATCHES_MAX} batches wait or are computed"))
        else:
            self._waiting.append(batch)
            self._changed.set()

    def _left(self, stream: int) -> None:
        """Drop a waiting batch, or let the running one end after its current item."""
        if (batch := next((waiting for waiting in self._waiting if waiting.stream == stream), None)) is not None:
            self._waiting.remove(batch)
            self.served.fail(stream, AskerLeft("the asker left"))
        elif self._computing is not None and self._computing.stream == stream:
            self._computing.left = True

    async def _compute(self) -> str:
        """Compute the batches in their order, for ever."""
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            batch = self._computing = self._waiting.popleft()
            await self._compute_one(batch)
            self._computing = None
            self._liveness.on_output()
            self.served.flush()

    async def _compute_one(self, batch: _Batch) -> None:
        loop = asyncio.get_running_loop()
        try:
            outcomes = await loop.run_in_executor(self._thread, self.tower.encode, batch.items, batch.is_wanted)
        except Exception as error:  # noqa: BLE001  # a fault of the engine, or of this file: of the batch as a whole
            failure = InternalError(f"the encoder failed the batch: {type(error).__name__}")
            self.served.fail(batch.stream, failure, last_line(error))
            return
        for outcome in outcomes:
            if outcome.code == InternalError.code:
                self.served.note_failure(outcome.detail)
        if batch.left:
            self.served.fail(batch.stream, AskerLeft("the asker left"))
        else:
            self.served.messages.end(batch.stream, EmbeddingBatch(tuple(outcomes)))
