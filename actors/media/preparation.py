"""The images and videos of one request on the processor's side: prepared before its prompt is known, encoded after.

Pixels are held by a call to the media actor, whose lease ends with the call. Engines that compute with pixels need them
until the answer is whole. For engines that compute with embeddings, pixels are released as soon as they are encoded;
the embeddings stay until the answer is whole, since a request without its engine goes on at another one. They have a
budget of their own, shared by all requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

import trio
from attrs import define, evolve, field, frozen

from actors.kit.calls import Answer, Askable
from actors.kit.fair_budget import FairBudget
from actors.kit.shares import BudgetLimits
from actors.media.layout import VisionLayout
from protocol.errors import BadRequest, InternalError, TooLarge, Unsupported
from protocol.messages.generation import Generate
from protocol.messages.media import Media, MediaForm, MediaInfo, MediaItem, MediaPrepared, PrepareMedia
from protocol.messages.text import Respond
from protocol.tensors import BYTES

MediaActor: TypeAlias = Askable[PrepareMedia, MediaPrepared, None]
EncodeItems: TypeAlias = Callable[[Respond, tuple[MediaItem, ...]], Awaitable[tuple[MediaItem, ...]]]
"""Returns the items of a request with embeddings in place of pixels."""

EMBEDDED_BYTES_MAX = 1024 * 1024 * 1024


def embeddings_budget(bytes_max: int = EMBEDDED_BYTES_MAX) -> FairBudget:
    """Return a budget of the bytes that embeddings may take while their answers are computed."""
    return FairBudget("memory for embeddings", BudgetLimits.of_all_sizes(bytes_max))


@frozen
class Vision:
    """The ports of a processor for images and videos of one model."""

    model: str
    media: MediaActor
    # Called where the engines of the model compute with embeddings.
    encode: EncodeItems
    # A budget of all models together.
    embeddings: FairBudget = field(factory=embeddings_budget)


@define(eq=False)
class MediaStage:
    """The stage of one request's images and videos; leaving `held` frees pixels, or the memory of embeddings."""

    request: Respond
    vision: Vision
    info: MediaInfo
    held: AsyncExitStack
    # The lease of the pixels, which may end before the request.
    _pixels: AsyncExitStack = field(factory=AsyncExitStack)

    async def prepare(self) -> tuple[MediaItem, ...]:
        """Return the items of the request, in the order of its turns, under digests that only its `cache_salt` gives.

        So encoders and engines share their results with requests of the same salt alone. Raises `BadRequest` for a
        client's embeddings in another form than the engines'.
        """
        await self.held.enter_async_context(self._pixels)
        items = await self._pixels.enter_async_context(_prepared(self.request, self.vision, self.info))
        return tuple(item.salted(self.request.cache_salt) for item in items)

    async def encode(self, generations: list[list[Generate]]) -> list[list[Generate]]:
        """Return the generations of the only prompt with embeddings in place of pixels, and release the pixels.

        Generations stay as they are where engines compute with pixels. Raises `TooLarge` for more embeddings than the
        budget has, and `InternalError` for embeddings that do not fit the prompt.
        """
        if self.info.form is not MediaForm.EMBEDDINGS:
            await trio.lowlevel.checkpoint()
            return generations
        request, info, budget = self.request, self.info, self.vision.embeddings
        items = generations[0][0].media
        size = sum(item.tokens for item in items) * info.width * BYTES[info.dtype]
        if budget.limits.never_fits(size):
            most = f"{budget.limits.call_max:,} of the {budget.limits.total:,} bytes for all"
            sentence = f"the embeddings of one request can have {most}, and these have {size:,}"
            raise TooLarge(sentence, param=_param(request, request.media[0]))
        await self.held.enter_async_context(budget.taking(size, request.owner))
        encoded = await self.vision.encode(request, items)
        _check_encoded(encoded, items, request, info)
        await self._pixels.aclose()
        return [[evolve(generation, media=encoded) for generation in choices] for choices in generations]


def media_stage(
    request: Respond,
    layout: VisionLayout | None,
    vision: Vision | None,
    info: MediaInfo | None,
    held: AsyncExitStack,
) -> MediaStage | None:
    """Return the stage for the images and videos of a request, None if it is text alone.

    Raises `Unsupported`, with the field of the first image or video that the model does not take.
    """
    media = request.media
    if not media:
        return None
    if layout is None or vision is None or info is None:
        raise Unsupported(f"this model takes text, and no {media[0].modality}s", param=_param(request, media[0]))
    for item in media:
        if None in {layout.placeholder(item.modality), info.placeholder(item.modality)}:
            raise Unsupported(f"this model takes no {item.modality}s", param=_param(request, item))
    return MediaStage(request, vision, info, held)


@asynccontextmanager
async def _prepared(request: Respond, vision: Vision, info: MediaInfo) -> AsyncIterator[tuple[MediaItem, ...]]:
    """Yield the items of a request, which are held during the body."""
    media = request.media
    ask = PrepareMedia(request.id, vision.model, media, request.owner, request.trace)
    async with vision.media.ask(ask, 1) as answer:
        items = _checked((await _first(answer)).items, media)
        for item, sent in zip(items, media, strict=True):
            if item.form is MediaForm.EMBEDDINGS and (mistake := _mistake(item, info)) is not None:
                raise BadRequest(mistake, param=_param(request, sent))
        yield items


async def _first(answer: Answer[MediaPrepared, None]) -> MediaPrepared:
    async for prepared in answer:
        return prepared
    raise InternalError("the media of the request were not prepared")


def _checked(items: Sequence[MediaItem], media: Sequence[Media]) -> tuple[MediaItem, ...]:
    if [item.modality for item in items] != [sent.modality for sent in media]:
        raise InternalError(f"{len(items)} items were prepared of {len(media)}")
    return tuple(items)


def _check_encoded(encoded: Sequence[MediaItem], items: Sequence[MediaItem], request: Respond, info: MediaInfo) -> None:
    """Raise `InternalError`, with both numbers, unless each item has one embedding for each of its placeholders."""
    # A prompt that was truncated has no longer the oldest items.
    kept = request.media[len(request.media) - len(items) :]
    for one, item, media in zip(encoded, items, kept, strict=True):
        if (one.tokens, one.grid, one.digest) != (item.tokens, item.grid, item.digest):
            raise InternalError(
                f"the encoder returned {one.tokens} embeddings in a grid of {_by(one.grid)} for this"
                f" {item.modality}, and the prompt has {item.tokens} places in one of {_by(item.grid)}",
                param=_param(request, media),
            )
        if (mistake := _mistake(one, info)) is not None:
            raise InternalError(f"the encoder was wrong: {mistake}", param=_param(request, media))


def _mistake(item: MediaItem, info: MediaInfo) -> str | None:
    """Return how embeddings differ from the engines', by whose size their memory is counted."""
    if info.form is not MediaForm.EMBEDDINGS:
        return f"this model computes with {info.form}, and takes no embeddings"
    shape = item.tokens, info.width
    if item.data.dtype is info.dtype and item.data.shape == shape:
        return None
    return (
        f"the embeddings are {_by(item.data.shape)} {item.data.dtype}, where this model takes {_by(shape)} {info.dtype}"
    )


def _param(request: Respond, media: Media) -> str:
    return media.param or request.param("turns")


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
