"""Images and videos in requests: what clients send, what engines compute with, and the messages between.

A client names each image or video by a URL (`Media`). The media actor fetches and decodes it into a `MediaItem` of
pixels; an encoder turns the pixels into embeddings; an engine without a vision tower takes those. Prompts contain one
placeholder token for each row of an item's embeddings, so the number of rows is known before anything is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from attrs import evolve, field, frozen

from protocol.errors import PeerViolation
from protocol.messages.kind import Kind, Message
from protocol.tensors import FLOATS, NO_TENSOR, Dtype, Tensor
from protocol.trace import Trace

DIGEST_LENGTH = 64
"""The hexadecimal digits of a digest: those of a SHA-256."""

DIGEST_DIGITS = frozenset("0123456789abcdef")
CHANNELS = 3  # of pixels: red, green, blue
GRID_MAX = 2**31  # patches in one direction, and tokens of an item

URL_SHOWN_CHARACTERS_MAX = 40
"""The most characters of a URL that a sentence or a log shows: a data URL has megabytes, and the rest may be secret."""


class Modality(StrEnum):
    """The kind of an item of a prompt."""

    IMAGE = "image"
    VIDEO = "video"


class Detail(StrEnum):
    """The resolution at which a model sees an image; `low` costs the fewest tokens."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


def _short(url: str) -> str:
    return repr(url if len(url) <= URL_SHOWN_CHARACTERS_MAX else url[: URL_SHOWN_CHARACTERS_MAX - 1] + "…")


@frozen
class Media:
    """An image or a video of a conversation, as its client names it: a URL of one of the schemes that are allowed.

    Its content may also be the embeddings of an image, as a safetensors file.
    """

    modality: Modality
    url: str = field(repr=_short)  # it may contain the whole image
    detail: Detail = Detail.AUTO
    param: str = ""  # the client's name of the field


class MediaForm(StrEnum):
    """The form in which an item reaches an engine, by what the engine computes with it."""

    PIXELS = "pixels"  # uint8 RGB, [frames, height, width, 3]: the engine encodes them itself
    EMBEDDINGS = "embeddings"  # [tokens, width]: an encoder has computed them
    PLACES = "places"  # no tensor: the positions alone, for a decode whose prefill has the embeddings


@frozen
class MediaItem:
    """One image or video of a prompt; items of a modality are in the order of their placeholders.

    `digest` names the content and how it was processed: items with the same digest have the same embeddings. `grid`
    has the patches in time, height and width, from which positions follow. `tokens` placeholders stand for it.
    """

    modality: Modality
    digest: str
    grid: tuple[int, int, int]
    tokens: int
    form: MediaForm
    data: Tensor = NO_TENSOR
    seconds_per_grid: float | None = None  # of a video: between two steps of the grid in time

    @property
    def place(self) -> MediaItem:
        """The item without its tensor, as a decode gets it."""
        return evolve(self, form=MediaForm.PLACES, data=NO_TENSOR)


@frozen
class MediaInfo:
    """The form of images and videos that an engine takes, and the tokens of a prompt that stand for them."""

    form: MediaForm
    width: int  # elements of an embedding
    dtype: Dtype  # of an embedding
    merge: int  # patches of the grid in each direction that one token stands for
    image_token: int | None = None  # the placeholder; None: the model takes none
    video_token: int | None = None
    start_token: int | None = None  # that stands before the placeholders of each item; None: any does

    def placeholder(self, modality: Modality) -> int | None:
        """Return the token id that stands for items of a modality, None if the model takes none."""
        return self.image_token if modality is Modality.IMAGE else self.video_token


@frozen
class PrepareMedia(Message):
    """Fetch and decode images and videos; answered by one `MediaPrepared`.

    What was prepared is kept until its asker leaves: the call is the lease of its memory. Work is fair between
    `owner`s, the names of clients' keys.
    """

    id: str
    model: str
    media: tuple[Media, ...]
    owner: str = ""
    trace: Trace | None = None


@frozen
class MediaPrepared(Message):
    """The items of a request, in the order of its media."""

    items: tuple[MediaItem, ...]


@frozen
class Encode(Message):
    """Compute the embeddings of one item; the result is `Encoded`.

    Of those that wait for a slot, the one with the highest `priority` is first. Queues are fair between `owner`s.
    """

    id: str
    item: MediaItem
    priority: int = 0
    trace: Trace | None = None
    owner: str = ""
    alone: bool = False  # in a batch of its own: an encoder was lost with a batch that it was in

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The pixels."""
        return (self.item.data,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Encode:
        """Return the request with other pixels."""
        (data,) = _exactly(1, tensors)
        return evolve(self, item=evolve(self.item, data=data))

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for an item that contradicts itself."""
        check_item(self.item)


@frozen
class Encoded(Message):
    """The item of an `Encode` with its embeddings; `cached` tells that they were computed before."""

    item: MediaItem
    cached: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The embeddings."""
        return (self.item.data,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Encoded:
        """Return the result with other embeddings."""
        (data,) = _exactly(1, tensors)
        return evolve(self, item=evolve(self.item, data=data))

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for an item that contradicts itself, or that has no embeddings."""
        if self.item.form is not MediaForm.EMBEDDINGS:
            raise PeerViolation(f"an item was encoded to {self.item.form}")
        check_item(self.item)


def check_item(item: MediaItem) -> None:
    """Raise `PeerViolation` for an item whose numbers cannot be, or whose tensor does not have its form.

    What one engine needs beyond that is checked by whoever gives the item to the engine.
    """
    tensor, shape = item.data, item.data.shape
    if len(item.digest) != DIGEST_LENGTH or not set(item.digest) <= DIGEST_DIGITS:
        raise PeerViolation(f"the digest of an item is not {DIGEST_LENGTH} hexadecimal digits")
    numbers = (*item.grid, item.tokens)
    if min(numbers) < 1 or max(numbers) > GRID_MAX:
        raise PeerViolation(f"an item has a grid of {item.grid} patches and {item.tokens} tokens")
    match item.form:
        case MediaForm.PIXELS:
            fits = tensor.dtype is Dtype.UINT8 and len(shape) == 4 and min(shape) > 0 and shape[3] == CHANNELS
        case MediaForm.EMBEDDINGS:
            fits = tensor.dtype in FLOATS and len(shape) == 2 and shape[0] == item.tokens and shape[1] > 0
        case MediaForm.PLACES:
            fits = shape == NO_TENSOR.shape
    if not fits:
        raise PeerViolation(f"{item.form} of {item.tokens} tokens are a {tensor.dtype} tensor of shape {shape}")


@frozen
class EncodeBatch(Message):
    """Compute the embeddings of several items, in the process of an encoder; the result is one `BatchEncoded`.

    It is sent between a node and its own engine's process. An engine computes one batch at a time.
    """

    id: str
    items: tuple[MediaItem, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The pixels of each item."""
        return tuple(item.data for item in self.items)

    def with_tensors(self, tensors: Sequence[Tensor]) -> EncodeBatch:
        """Return the batch with other pixels."""
        return evolve(self, items=with_data(self.items, tensors))


@frozen
class EncodedItem:
    """The outcome of one item of a batch: its embeddings, or the code and the sentence of its own error."""

    data: Tensor = NO_TENSOR
    code: str = ""  # of a `RequestError`; empty: the embeddings are there
    detail: str = ""


@frozen
class BatchEncoded(Message):
    """The outcomes of the items of a batch, in their order: one that is wrong fails alone."""

    outcomes: tuple[EncodedItem, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The embeddings of each item, without elements for one that failed."""
        return tuple(outcome.data for outcome in self.outcomes)

    def with_tensors(self, tensors: Sequence[Tensor]) -> BatchEncoded:
        """Return the outcomes with other embeddings."""
        pairs = zip(self.outcomes, _exactly(len(self.outcomes), tensors), strict=True)
        return BatchEncoded(tuple(evolve(outcome, data=data) for outcome, data in pairs))


def with_data(items: Iterable[MediaItem], tensors: Sequence[Tensor]) -> tuple[MediaItem, ...]:
    """Return the items with one tensor each."""
    items = tuple(items)
    return tuple(evolve(item, data=data) for item, data in zip(items, _exactly(len(items), tensors), strict=True))


def grid_tokens(grid: tuple[int, int, int], merge: int) -> int:
    """Return the tokens that a grid of patches makes, `merge` x `merge` patches each; 0 for an impossible grid."""
    time, height, width = grid
    if min(grid) < 1 or height % merge or width % merge:
        return 0
    return time * (height // merge) * (width // merge)


def expected_shape(item: MediaItem, info: MediaInfo) -> tuple[int, ...] | None:
    """Return the shape that an item's tensor must have for an engine; None where pixels may have any size."""
    match item.form:
        case MediaForm.EMBEDDINGS:
            return item.tokens, info.width
        case MediaForm.PLACES:
            return (0,)
        case MediaForm.PIXELS:
            return None


def padded_tokens(tokens: Sequence[int], items: Sequence[MediaItem], info: MediaInfo | None) -> list[int]:
    """Return a prompt's token ids with those of the digests of its items in place of placeholders.

    Two prompts share a prefix only as far as these are equal, for prefix caches are keyed by tokens: behind the same
    text, different images must differ. The ids are negative, so that they are no model's.
    """
    padded = list(tokens)
    if info is None or not items:
        return padded
    for modality in Modality:
        placeholder = info.placeholder(modality)
        places = (place for place, token in enumerate(tokens) if token == placeholder)
        of_modality = ((_digest_bits(item), item.tokens) for item in items if item.modality is modality)
        pads = (-1 - (bits ^ row) for bits, rows in of_modality for row in range(rows))
        for place, pad in zip(places, pads, strict=False):
            padded[place] = pad
    return padded


def _digest_bits(item: MediaItem) -> int:
    """Return the first 48 bits of the digest of an item."""
    return int(item.digest[:12] or "0", 16)


def _exactly(count: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) != count:
        raise PeerViolation(f"{len(tensors)} tensors for {count} items")
    return tensors


KINDS = (
    Kind(32, Encode, result=Encoded),
    Kind(33, Encoded),
    Kind(34, EncodeBatch, result=BatchEncoded),
    Kind(35, BatchEncoded),
)
