"""The media actor: fetches and decodes the images and videos of requests, and holds them while they are needed.

A call is a lease: it is answered by one `MediaPrepared` and lasts until its asker leaves. Then its memory is free. The
memory of a request is reserved before it is used: the bytes of its contents before they are fetched, and the bytes of
its tensors once every header has been read. Both are budgets of all requests together, in which a request waits for
free memory. It takes each of them once and whole: no two requests wait for each other's. What one owner may have bounds
a single request, too: items of more contents than that are opened in turn (`content_memory.py`).

The items of a request run in one nursery: the first that fails ends the others. This file neither opens a URL nor reads
a byte of a content.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Generic, Protocol, TypeAlias, TypeVar

import trio
from attrs import define, evolve, field, frozen

from actors.kit.calls import BugCounter, Call, Inbox
from actors.kit.fair_budget import BudgetStatistics, FairBudget
from actors.kit.groups import first_of
from actors.kit.shares import BudgetLimits
from actors.media.content_memory import ContentMemory, counted_bytes
from actors.media.jobs import Facts
from actors.media.layout import VisionLayout
from actors.media.planning import Plan, plan
from protocol.errors import (
    AskerLeft,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    RequestError,
    TooLarge,
    Unsupported,
)
from protocol.messages.media import Media, MediaItem, MediaPrepared, Modality, PrepareMedia
from protocol.tensors import NO_TENSOR, Tensor

FETCHES_MAX = 16  # fetches at a time
WAITING_MAX = 256  # requests that wait to begin
DECODERS_BESIDE = 1  # processes for small jobs, beside those of one owner


class Content(Protocol):
    """The content of a URL; its owner closes it."""

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""

    def close(self) -> None:
        """Give it back; idempotent."""


C = TypeVar("C", bound=Content)


@frozen
class Source:
    """A URL before it is opened: the most memory of its content, and whether its fetch waits for others."""

    bytes_max: int
    is_remote: bool


@frozen
class Allowance:
    """The most bytes of a remote content, and the owner whose part of threads its fetch may use."""

    bytes_max: int
    owner: str


@frozen
class Inspected(Generic[C]):
    """A content after a look at its header, with the SHA-256 of its bytes; `content` may be another than before."""

    content: C
    digest: str
    facts: Facts


@frozen
class MediaPorts(Generic[C]):
    """The ports of the work; each raises `RequestError`, and ends at once when it is cancelled."""

    source: Callable[[str], Source]
    fetch: Callable[[str, Allowance], Awaitable[C]]
    inspect: Callable[[C, Modality], Awaitable[Inspected[C]]]
    decode: Callable[[C, Plan], Awaitable[Tensor]]
    release: Callable[[Tensor], None]  # frees an unused tensor


@frozen
class PreparationLimits:
    """The limits of one request (`items_max`, `tokens_max`, `prepare_s`), and of all requests together."""

    items_max: int
    tokens_max: int
    prepare_s: float
    fetched_bytes_max: int
    prepared_bytes_max: int
    decodes_max: int
    fetches_max: int = FETCHES_MAX
    waiting_max: int = WAITING_MAX


Observer: TypeAlias = Callable[[str, str, float], None]
"""Receives the model of each request, how its preparation ended (`prepared`, `left` or a code), and the seconds."""


@frozen
class MediaStatistics:
    """The budgets of the actor at one moment."""

    fetched_bytes: BudgetStatistics
    prepared_bytes: BudgetStatistics
    fetches: BudgetStatistics
    decodes: BudgetStatistics


@define(eq=False)
class Preparations(Generic[C]):
    """Prepares requests within their limits. It outlives the actor's restarts; an ended request gives all back."""

    layouts: Mapping[str, VisionLayout]  # layouts by model
    ports: MediaPorts[C]
    limits: PreparationLimits
    observe: Observer
    _fetched: FairBudget = field(init=False)
    _prepared: FairBudget = field(init=False)
    _fetches: FairBudget = field(init=False)
    _decodes: FairBudget = field(init=False)

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        fetched, prepared = map(BudgetLimits.of_all_sizes, (limits.fetched_bytes_max, limits.prepared_bytes_max))
        self._fetched = FairBudget("a place to fetch to", fetched, limits.waiting_max)
        self._prepared = FairBudget("memory", prepared)
        self._fetches = FairBudget("a fetch", BudgetLimits.of_places(limits.fetches_max))
        self._decodes = FairBudget("a decoder", decoder_limits(limits.decodes_max))

    def statistics(self) -> MediaStatistics:
        """Return the budgets' counts."""
        budgets = self._fetched, self._prepared, self._fetches, self._decodes
        return MediaStatistics(*(budget.statistics() for budget in budgets))

    @asynccontextmanager
    async def prepared(self, request: PrepareMedia) -> AsyncIterator[tuple[MediaItem, ...]]:
        """Yield the items of a request, in its order, and hold them during the body; raises `RequestError`."""
        began_at, outcome = trio.current_time(), AskerLeft.code
        async with AsyncExitStack() as lease:
            try:
                items = await self._prepare_in_time(request, lease)
                outcome = "prepared"
            except Exception as error:
                failure = first_of(error, RequestError)
                outcome = InternalError.code if failure is None else failure.code
                raise
            finally:
                self.observe(request.model, outcome, trio.current_time() - began_at)
            yield items

    async def _prepare_in_time(self, request: PrepareMedia, lease: AsyncExitStack) -> tuple[MediaItem, ...]:
        within_s = self.limits.prepare_s
        with trio.move_on_after(within_s):
            return await self._prepare(request, lease)
        raise DeadlineExceeded(f"the images and videos of the request were not ready within {within_s:g} s")

    async def _prepare(self, request: PrepareMedia, lease: AsyncExitStack) -> tuple[MediaItem, ...]:
        layout, items = self._checked(request)
        wanted = sum(counted_bytes(item.source.bytes_max) for item in items)
        async with self._fetched.taking(min(wanted, self._fetched.limits.call_max), request.owner) as fetched:
            memory = ContentMemory(fetched.units)
            try:
                async with trio.open_nursery() as nursery:
                    for item in items:
                        nursery.start_soon(self._open, item, memory, layout, request.owner)
                fetched.shrink(memory.held_bytes)
                await lease.enter_async_context(self._prepared.taking(self._tensor_bytes(items), request.owner))
                async with trio.open_nursery() as nursery:
                    for item in items:
                        nursery.start_soon(self._decode, item, request.owner, lease)
            finally:
                for item in items:
                    item.close()
        return tuple(evolve(item.plan.item, data=item.tensor) for item in items if item.plan is not None)

    def _checked(self, request: PrepareMedia) -> tuple[VisionLayout, list[_Item[C]]]:
        """Return the items of a request, whose URLs may all be opened; raises `BadRequest` before anything begins."""
        layout, media = self.layouts.get(request.model), request.media
        if layout is None:
            raise Unsupported(f"the model {request.model} takes no images and no videos")
        if len(media) > self.limits.items_max:
            detail = f"a request can have {self.limits.items_max} images and videos, and this one has {len(media)}"
            raise BadRequest(detail, param=media[self.limits.items_max].param or None)
        items: list[_Item[C]] = []
        for one in media:
            with _blaming(one):
                if layout.placeholder(one.modality) is None:
                    raise Unsupported(f"the model {request.model} takes no {one.modality}s")
                items.append(_Item(one, self.ports.source(one.url)))
        return layout, items

    async def _open(self, item: _Item[C], memory: ContentMemory, layout: VisionLayout, owner: str) -> None:
        """Fetch an item and plan how it is decoded."""
        with _blaming(item.media):
            async with memory.opening(item.source.bytes_max) as bytes_max:
                allowance = Allowance(bytes_max, owner)
                if item.source.is_remote:
                    async with self._fetches.taking(1, owner):
                        item.content = await self.ports.fetch(item.media.url, allowance)
                elif item.source.bytes_max > bytes_max:
                    raise memory.too_large()
                else:
                    item.content = await self.ports.fetch(item.media.url, allowance)
                async with self._decodes.taking(1, owner, small=True):
                    inspected = await self.ports.inspect(item.content, item.media.modality)
                item.content = inspected.content
                memory.add(item.content.size_bytes)
            item.plan = plan(item.media, layout, inspected.digest, inspected.facts)

    def _tensor_bytes(self, items: list[_Item[C]]) -> int:
        """Return the bytes of a request's tensors; raises `TooLarge` or `BadRequest` for more than there may be."""
        size, tokens, limits = 0, 0, self._prepared.limits
        for item in items:
            assert item.plan is not None
            size, tokens = size + item.plan.size_bytes, tokens + item.plan.item.tokens
            with _blaming(item.media):
                if tokens > self.limits.tokens_max:
                    most = self.limits.tokens_max
                    raise BadRequest(f"the images and videos of one request can make {most:,} tokens: ask for less")
                if limits.never_fits(size):
                    most_bytes = f"{limits.call_max:,} of the {limits.total:,} bytes for all"
                    raise TooLarge(f"decoded, the images and videos of one request can have {most_bytes}")
        return size

    async def _decode(self, item: _Item[C], owner: str, lease: AsyncExitStack) -> None:
        assert item.plan is not None
        assert item.content is not None
        with _blaming(item.media):
            async with self._decodes.taking(1, owner, small=item.plan.is_small):
                item.tensor = await self.ports.decode(item.content, item.plan)
        lease.callback(self.ports.release, item.tensor)
        item.close()


@define(eq=False)
class _Item(Generic[C]):
    """One image or video of a request, while it is prepared."""

    media: Media
    source: Source
    content: C | None = None
    plan: Plan | None = None
    tensor: Tensor = NO_TENSOR

    def close(self) -> None:
        """Give the content back."""
        if self.content is not None:
            self.content.close()
            self.content = None


def decoder_limits(decoders: int) -> BudgetLimits:
    """Return the limits of decoder processes: beside those of one owner there is one for a small job of another."""
    return BudgetLimits(decoders + DECODERS_BESIDE, decoders, large_max=decoders)


@contextmanager
def _blaming(media: Media) -> Iterator[None]:
    """Let errors of the client name the field of an image or a video."""
    try:
        yield
    except RequestError as error:
        if error.fault == "client" and error.param is None:
            error.param = media.param or None
        raise


async def media(
    inbox: Inbox[Call[PrepareMedia, MediaPrepared, None]],
    preparations: Preparations[C],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer each call with the items of its request, and hold them until its asker leaves."""
    bugs = BugCounter()

    async def answer_one(call: Call[PrepareMedia, MediaPrepared, None]) -> None:
        with call.answering(bugs) as answer:
            async with preparations.prepared(call.request) as items:
                answer.put(MediaPrepared(items))
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        task_status.started()
        while True:
            nursery.start_soon(answer_one, await inbox.receive())
