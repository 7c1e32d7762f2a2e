"""The images and videos of one request on the processor's side: prepared before its prompt is known, encoded after.

What is prepared is held by a call to the media actor, for as long as something here needs it: until the items are
encoded, or where engines compute with pixels themselves, until the answer is whole. Embeddings are needed as long, too,
since a request that loses its engine goes on at another one; they have a budget of their own, of all requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeGuard

from attrs import field, frozen

from actors.kit.calls import Answer, Askable
from actors.kit.fair_budget import FairBudget
from actors.media.layout import VisionLayout
from protocol.errors import BadRequest, InternalError, TooLarge, Unsupported
from protocol.messages.media import Media, MediaForm, MediaInfo, MediaItem, MediaPrepared, PrepareMedia, expected_shape
from protocol.messages.text import Respond
from protocol.tensors import BYTES

MediaActor: TypeAlias = Askable[PrepareMedia, MediaPrepared, None]
EncodeItems: TypeAlias = Callable[[Respond, tuple[MediaItem, ...]], Awaitable[tuple[MediaItem, ...]]]
"""Returns the items of a request with embeddings in place of pixels."""

OWNER_PART = 0.75  # of the memory for embeddings, that one owner may have
EMBEDDED_BYTES_MAX = 1024 * 1024 * 1024


def embeddings_budget(bytes_max: int = EMBEDDED_BYTES_MAX) -> FairBudget:
    """Return a budget of the bytes that embeddings may take while their answers are computed."""
    return FairBudget("memory for embeddings", bytes_max, max(1, int(bytes_max * OWNER_PART)))


@frozen
class Vision:
    """The ports of a processor for images and videos of one model."""

    model: str
    media: MediaActor
    encode: EncodeItems  # where the engines of the model compute with embeddings
    embeddings: FairBudget = field(factory=embeddings_budget)  # of all models together


def required_vision(
    request: Respond, layout: VisionLayout | None, vision: Vision | None, info: MediaInfo | None
) -> Vision | None:
    """Return the ports that a request needs, None if it is text alone.

    Raises `Unsupported`, with the field of the first of them, for images or videos that the model does not take.
    """
    media = request.media
    if media and (layout is None or vision is None or info is None):
        raise Unsupported(f"this model takes text, and no {media[0].modality}s", param=_param(request, media[0]))
    for each in media:
        if layout and info and None in {layout.placeholder(each.modality), info.placeholder(each.modality)}:
            raise Unsupported(f"this model takes no {each.modality}s", param=_param(request, each))
    return vision if media else None


def takes_embeddings(info: MediaInfo | None) -> TypeGuard[MediaInfo]:
    """Whether the engines of a model compute with embeddings, so that pixels are encoded first."""
    return info is not None and info.form is MediaForm.EMBEDDINGS


def embedded_bytes(items: Sequence[MediaItem], info: MediaInfo) -> int:
    """Return the size of the embeddings of items, which is known before they are: so many bytes for each token."""
    return sum(item.tokens for item in items) * info.width * BYTES[info.dtype]


@asynccontextmanager
async def embedding_memory(size: int, request: Respond, vision: Vision) -> AsyncIterator[None]:
    """Hold memory for the embeddings of a request while the body runs, waiting for it; raises `TooLarge`."""
    total = vision.embeddings.total
    if size > total:
        param = _param(request, request.media[0])
        raise TooLarge(f"the embeddings of one request can have {total:,} bytes, and these have {size:,}", param=param)
    async with vision.embeddings.taking(size, request.owner):
        yield


@asynccontextmanager
async def prepared_media(request: Respond, vision: Vision, info: MediaInfo) -> AsyncIterator[tuple[MediaItem, ...]]:
    """Yield the items of a request's images and videos, in the order of its turns; they are held during the body.

    Raises `BadRequest` for embeddings of a client that are not what the engines compute with.
    """
    media = request.media
    ask = PrepareMedia(request.id, vision.model, media, request.owner, request.trace)
    async with vision.media.ask(ask, 1) as answer:
        items = _checked((await _first(answer)).items, media)
        for item, each in zip(items, media, strict=True):
            if item.form is MediaForm.EMBEDDINGS and (mistake := _mistake(item, info)) is not None:
                raise BadRequest(mistake, param=_param(request, each))
        yield items


async def _first(answer: Answer[MediaPrepared, None]) -> MediaPrepared:
    async for prepared in answer:
        return prepared
    raise InternalError("the media of the request were not prepared")


def _checked(items: Sequence[MediaItem], media: Sequence[Media]) -> tuple[MediaItem, ...]:
    if [item.modality for item in items] != [each.modality for each in media]:
        raise InternalError(f"{len(items)} items were prepared of {len(media)}")
    return tuple(items)


def _mistake(item: MediaItem, info: MediaInfo) -> str | None:
    """Return how embeddings differ from those that engines take: their memory is counted as that of these."""
    if info.form is not MediaForm.EMBEDDINGS:
        return f"this model computes with {info.form}, and takes no embeddings"
    if item.data.dtype is info.dtype and item.data.shape == expected_shape(item, info):
        return None
    return (
        f"the embeddings are {_by(item.data.shape)} {item.data.dtype}, where this model takes"
        f" {_by((item.tokens, info.width))} {info.dtype}"
    )


def check_encoded(encoded: Sequence[MediaItem], items: Sequence[MediaItem], request: Respond, info: MediaInfo) -> None:
    """Raise `InternalError`, with both numbers, unless each item has the embeddings that its prompt has places for."""
    kept = request.media[len(request.media) - len(items) :]  # the oldest are left out of a prompt that is truncated
    for one, item, media in zip(encoded, items, kept, strict=True):
        if (one.tokens, one.grid, one.digest) != (item.tokens, item.grid, item.digest):
            raise InternalError(
                f"the encoder returned {one.tokens} embeddings in a grid of {_by(one.grid)} for this {item.modality},"
                f" and the prompt has {item.tokens} places in one of {_by(item.grid)}",
                param=_param(request, media),
            )
        if (mistake := _mistake(one, info)) is not None:
            raise InternalError(f"the encoder was wrong: {mistake}", param=_param(request, media))


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _param(request: Respond, media: Media) -> str:
    return media.param or request.params.get("turns", "turns")
