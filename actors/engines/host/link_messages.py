"""Requests and results at a host's end of its link, with their tensors; for any event loop, and for none.

A request that cannot be read fails alone: the frames around it were legal, so the link and the engine go on. The memory
of a request's tensors is mapped, and belongs to its stream: it is unmapped when the stream ends. Large tensors of a
result are left in a region until the node has taken them. The node reports that by a `Cancel` of the ended stream;
without it a lease ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from attrs import define, field, frozen

from actors.engines.shared_tensors import (
    SHARED_BYTES_MIN,
    Region,
    SealedMapping,
    new_region,
    open_tensors,
    region_bytes,
)
from protocol.byte_budget import ByteBudget, ByteShare
from protocol.errors import AskerLeft, InternalError, PeerViolation, RequestError, TooLarge
from protocol.link import codec
from protocol.link.frames import FRAME_BYTES_MAX, End, Fail, Item, Open
from protocol.link.peer import Peer
from protocol.messages.kind import Message
from protocol.tensors import Tensor

BODY_BYTES_MAX = FRAME_BYTES_MAX - 4096  # the rest of a frame is short
SHARED_BYTES_MAX = 512 * 1024 * 1024  # the most bytes of results in regions; further ones are attached
LEASE_S = 30.0  # how long a result waits for its node


class CallLater(Protocol):
    """`loop.call_later` of asyncio, as far as it is used here."""

    def __call__(self, delay: float, callback: Callable[[int], None], stream: int, /) -> object:
        """Call `callback(stream)` after `delay` seconds."""


@frozen
class HostStatistics:
    """The mappings of requests, and the regions of results not yet taken by the node, with their bytes."""

    mappings: int = 0
    mapped_bytes: int = 0
    regions: int = 0
    region_bytes: int = 0


@define(eq=False)
class LinkMessages:
    """The messages of one link's streams; sent ones are queued in the `peer`, and written by the owner of both.

    Without `call_later` no result is shared, since no lease could end.
    """

    peer: Peer
    call_later: CallLater | None = None
    shared_bytes_max: int = SHARED_BYTES_MAX
    lease_s: float = LEASE_S
    _views: dict[int, list[Tensor]] = field(factory=dict, init=False)  # requests' tensors, by stream
    _mappings: dict[int, list[SealedMapping]] = field(factory=dict, init=False)
    _regions: dict[int, tuple[Region, ByteShare]] = field(factory=dict, init=False)  # results' regions, by stream
    _budget: ByteBudget = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._budget = ByteBudget(self.shared_bytes_max)

    def statistics(self) -> HostStatistics:
        """Return the counts of this moment."""
        mappings = [mapping for of_stream in self._mappings.values() for mapping in of_stream]
        regions = [region for region, _ in self._regions.values()]
        return HostStatistics(
            len(mappings), sum(map(len, mappings)), len(regions), sum(region.size for region in regions)
        )

    # Requests --------------------------------------------------------------------------

    def request(self, frame: Open) -> Message:
        """Return the request of an `Open` that the peer yields at this moment; its tensors are there until its end.

        Raises a `RequestError` if it cannot be read; then the stream is to be ended by `fail`.
        """
        try:
            request = codec.decode(frame.body, self.peer.attached, shared=True)
        except PeerViolation as error:
            raise InternalError(f"the engine's process cannot read the request: {error}") from error
        if all(tensor.shared is None for tensor in request.tensors):
            return request
        tensors, mappings = open_tensors(request.tensors)
        for mapping in mappings:
            os.close(mapping.descriptor)  # no other process opens it from here
            mapping.descriptor = -1
        self._mappings[frame.stream] = mappings
        self._views[frame.stream] = [tensor for tensor in tensors if tensor.shared is not None]
        return request.with_tensors(tensors)

    def ended(self, stream: int) -> None:
        """Unmap the memory of a request that has ended in a `Step`; idempotent.

        Its views are released, even with references to them left: the mapping ends with the last view. A buffer in a
        computation cannot be released, and is there until the computation is done.
        """
        self._mappings.pop(stream, None)
        for tensor in self._views.pop(stream, ()):
            with suppress(BufferError):
                tensor.data.release()

    # Replies and results ----------------------------------------------------------------

    def reply(self, stream: int, reply: Message) -> None:
        """Send a reply with its tensors attached; raises `TooLarge` for more bytes than the link takes."""
        attached = codec.attached(reply)
        item = Item(stream, codec.encode(reply), codec.units_of(reply), sum(map(len, attached)))
        self.peer.send(item, attached)

    def end(self, stream: int, result: Message) -> None:
        """End a stream with its result, whose tensors come before it; one that fits no link fails the stream."""
        if self.peer.served.state(stream) == "leaving":  # its tensors would stay
            self.fail(stream, AskerLeft("the asker left"))
            return
        try:
            self._end(stream, self._shared(stream, result))
        except RequestError as error:
            self.taken(stream)
            self.fail(stream, error)
        self.ended(stream)

    def fail(self, stream: int, error: RequestError) -> None:
        """End a stream with an error."""
        self.peer.send(Fail(stream, error.code, error.detail, error.param))
        self.ended(stream)

    def taken(self, stream: int) -> None:
        """Free the region of a result; to be called for every `Cancel`, since it has been taken then; idempotent."""
        if (shared := self._regions.pop(stream, None)) is not None:
            region, share = shared
            region.close()
            share.give_back()

    def _shared(self, stream: int, result: Message) -> Message:
        """Return a result with its large tensors in a region of the stream, if there is room for it."""
        tensors = list(result.tensors)
        indices = [index for index, tensor in enumerate(tensors) if len(tensor.data) >= SHARED_BYTES_MIN]
        large = [tensors[index] for index in indices]
        if self.call_later is None or not indices or not self._budget.fits(region_bytes(large)):
            return result
        region, share = new_region(), self._budget.share(region_bytes(large), _ignore)
        self._regions[stream] = region, share
        for _ in region.write(large):
            pass
        for index, tensor in zip(indices, region.describe(large), strict=True):
            tensors[index] = tensor
        self.call_later(self.lease_s, self.taken, stream)
        return result.with_tensors(tensors)

    def _end(self, stream: int, result: Message) -> None:
        body, attached = codec.encode(result), codec.attached(result)
        if len(body) > BODY_BYTES_MAX:
            raise TooLarge(f"a {type(result).__name__} of {len(body)} bytes; the limit of a link is {BODY_BYTES_MAX}")
        if attached:
            self.peer.send(Item(stream, b"", 0, sum(map(len, attached))), attached)
        self.peer.send(End(stream, body))


def _ignore() -> None:
    pass
