"""The encode leg of a request: its images and videos to embeddings, before an engine is asked to compute with them.

The items of a request are encoded concurrently, each by one encoder, and all of them or none: the failure of one ends
the others in the same turn. Among encoders with room an item goes to the highest by rendezvous hashing of its digest,
so that all routers send the same image to the same cache.

A lost encoder costs its items one attempt; they are encoded elsewhere, or there once it is up again. Encoders compute
items of many requests in one batch, so any item of it may have crashed the encoder: each is encoded alone from then on,
and an item that crashes encoders alone fails by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

import trio
from attrs import define, field, frozen

from actors.kit.groups import first_leaf, raise_part
from actors.routing.ports import EncoderPool, RoutedEncoder, RoutingObserver
from actors.routing.route import FailoverLimits
from protocol.errors import ActorLost, AskerLeft, Draining, EngineLost, LinkLost, NotReady, Overloaded, RequestError
from protocol.messages.media import Encode, MediaForm, MediaItem
from protocol.trace import Trace, child_span

FAILOVER = (ActorLost, Draining, EngineLost, LinkLost, NotReady, Overloaded)
"""Errors after which an item is encoded elsewhere: the encoder, its node or the link to it may be to blame."""

NO_ENCODER = "no encoder of this model is up, and images and videos need one"


@frozen
class EncodeWork:
    """Items to encode, for one request."""

    id: str
    items: tuple[MediaItem, ...]
    priority: int = 0
    owner: str = ""
    trace: Trace | None = None


@frozen
class Encoding:
    """The encode leg of one model: its encoders, and the limits on losing some."""

    pool: EncoderPool
    limits: FailoverLimits
    new_id: Callable[[], str]
    observer: RoutingObserver = RoutingObserver()

    async def embeddings(self, work: EncodeWork) -> tuple[MediaItem, ...]:
        """Return the items with embeddings in place of pixels; an item without pixels stays as it is.

        Raises the `RequestError` of the first item that cannot be encoded.
        """
        items = list(work.items)

        async def encode(index: int) -> None:
            items[index] = await _Item(self, work, items[index]).embedded()

        try:
            async with trio.open_nursery() as nursery:
                for index, item in enumerate(items):
                    if item.form is MediaForm.PIXELS:
                        nursery.start_soon(encode, index)
        except BaseExceptionGroup as group:
            failed, rest = group.split(RequestError)
            try:
                if failed is None or rest is not None:
                    raise
                raise_part(first_leaf(failed))
            finally:
                del failed, rest  # their tracebacks refer to this frame, and so to the pixels
        return tuple(items)  # noqa: ASYNC910  # the nursery has checkpoints


@define(eq=False)
class _Item:
    """One item on its way through encoders."""

    encoding: Encoding
    work: EncodeWork
    item: MediaItem
    _losses: int = 0
    _crashes: int = 0
    _pause_s: float = field(default=0.0)

    async def embedded(self) -> MediaItem:
        """Return the item with its embeddings; raises the error of the last attempt."""
        lost: set[str] = set()
        encoder = await self._first()
        while True:
            try:
                return await self._asked(encoder)
            except FAILOVER as error:
                lost.add(encoder.full_name)
                encoder = await self._next(error, lost)

    async def _asked(self, encoder: RoutedEncoder) -> MediaItem:
        outcome = AskerLeft.code
        try:
            async with encoder.ask(self._request(), 0) as answer:
                encoded = await answer.result()
            outcome = "ended"
        except RequestError as error:
            outcome = error.code
            raise
        finally:
            self.encoding.observer.call_ended(encoder.full_name, outcome)
        assert encoded is not None  # an encoder ends with a result or an error
        return encoded.item

    def _request(self) -> Encode:
        work, new_id = self.work, self.encoding.new_id
        trace = work.trace
        if trace is not None and trace.followed:
            trace = child_span(trace, new_id())
        return Encode(new_id(), self.item, work.priority, trace, work.owner, alone=self._crashes > 0)

    async def _first(self) -> RoutedEncoder:
        """Return the encoder of the first attempt; raises `NotReady` if none comes up in time."""
        if (encoder := await self._wait((), self.encoding.limits.resume_s)) is None:
            raise NotReady(NO_ENCODER, client_detail=NO_ENCODER)
        return encoder

    async def _next(self, error: RequestError, lost: set[str]) -> RoutedEncoder:
        """Wait for the next encoder: another one, or after a pause any; raises `error` beyond a limit."""
        limits = self.encoding.limits
        self._crashes += isinstance(error, EngineLost)
        self._losses += not isinstance(error, NotReady | Draining)
        if self._losses > limits.resumes_max or self._crashes > limits.crashes_max:
            raise error
        self._pause_s = min(2 * self._pause_s, limits.pause_max_s) or limits.pause_s
        encoder = await self._wait(lost, self._pause_s) or await self._wait((), limits.resume_s)
        if encoder is None:
            raise error
        self.encoding.observer.call_resumed(error.code, 0)
        return encoder

    async def _wait(self, excluded: Collection[str], within_s: float) -> RoutedEncoder | None:
        """Return an encoder as soon as there is one, None if none comes in time."""
        with trio.move_on_after(within_s):
            await trio.lowlevel.checkpoint()
            while (encoder := self._choose(excluded)) is None:
                await self.encoding.pool.wait_changed()
            return encoder
        return None

    def _choose(self, excluded: Collection[str]) -> RoutedEncoder | None:
        """Return the digest's highest encoder with room, or if all are full, the least busy one.

        In a full one the item waits in the encoder's inbox, where the most urgent is next and owners take turns.
        """
        encoders = [encoder for encoder in self.encoding.pool.encoders() if encoder.full_name not in excluded]
        loads = [(encoder, encoder.load) for encoder in encoders]
        with_room = [encoder for encoder, load in loads if load.busy < load.slots]
        if with_room:
            return max(with_room, key=lambda encoder: rank(self.item.digest, encoder.full_name))
        return min(loads, key=lambda pair: pair[1].busy / pair[1].slots, default=(None, None))[0]


def rank(digest: str, name: str) -> bytes:
    """Return the rank of an encoder for a digest, by rendezvous hashing: each digest orders the names differently."""
    return blake2b(f"{digest} {name}".encode(), digest_size=8).digest()


def placed(items: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Return the items without their tensors, as a decode gets them: its prefill has the embeddings."""
    return tuple(item.place for item in items)
