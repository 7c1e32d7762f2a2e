"""Images and videos in requests, from a client's URL to the input of an engine.

A client names each image or video by a URL (`Media`). The media actor fetches and decodes it into a `MediaItem` of
pixels; an encoder turns the pixels into embeddings; an engine without a vision tower takes the embeddings. Prompts
contain one placeholder token for each row of an item's embeddings, so the number of rows is computed before encoding.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import sha256

from attrs import evolve, field, frozen

from protocol.errors import PeerViolation
from protocol.messages.kind import Kind, Message
from protocol.tensors import FLOATS, NO_TENSOR, Dtype, Tensor
from protocol.token_ids import TokenIds
from protocol.trace import Trace

DIGEST_LENGTH = 64
"""The hexadecimal digits of a digest, a SHA-256."""

DIGEST_DIGITS = frozenset("0123456789abcdef")
CHANNELS = 3  # red, green, blue
_SALT_TAG = "espalier-media-salt-v1\0"
PADS_MIN = 2**31
GRID_MAX = 2**31  # patches in one direction, and tokens of an item
BATCHES_MAX = 4  # batches in the process of an encoder, the running one and the waiting ones

URL_SHOWN_CHARACTERS_MAX = 40
"""The most characters of a URL in a sentence or a log: a data URL has megabytes, and the rest may be secret."""


class Modality(StrEnum):
    """The kind of an item of a prompt."""

    IMAGE = "image"
    VIDEO = "video"


class Detail(StrEnum):
    """The resolution of an image for the model; `low` costs the fewest tokens."""

    AUTO = "auto"
    LOW = "low"
    HIGH = "high"


def _short(url: str) -> str:
    return repr(url if len(url) <= URL_SHOWN_CHARACTERS_MAX else url[: URL_SHOWN_CHARACTERS_MAX - 1] + "…")


@frozen
class Media:
    """An image or a video of a conversation, by its URL of an allowed scheme.

    Its content may also be the embeddings of an image, as a safetensors file.
    """

    modality: Modality
    url: str = field(repr=_short)  # it may contain the whole image
    detail: Detail = Detail.AUTO
    param: str = ""  # the client's name of the field


class MediaForm(StrEnum):
    """The form of an item in a request to an engine."""

    PIXELS = "pixels"  # uint8 RGB, [frames, height, width, 3]: the engine encodes them itself
    EMBEDDINGS = "embeddings"  # [tokens, width], computed by an encoder
    PLACES = "places"  # no tensor: the positions alone, for a decode whose prefill has the embeddings


@frozen
class MediaItem:
    """One image or video of a prompt; items of a modality are in the order of their placeholders.

    `digest` identifies the content and its processing: items with the same digest have the same embeddings. `grid` has
    the patches in time, height and width, from which positions follow. `tokens` placeholders stand for it.
    """

    modality: Modality
    digest: str
    grid: tuple[int, int, int]
    tokens: int
    form: MediaForm
    data: Tensor = NO_TENSOR
    seconds_per_grid: float | None = None  # the time between two steps of a video's grid

    def salted(self, cache_salt: str | None) -> MediaItem:
        """Return the item under a digest that only requests with this salt share; without a salt, the item itself."""
        if cache_salt is None:
            return self
        return evolve(self, digest=sha256(f"{_SALT_TAG}{self.digest}\0{cache_salt}".encode()).hexdigest())

    @property
    def place(self) -> MediaItem:
        """The item without its tensor, as a decode gets it."""
        return evolve(self, form=MediaForm.PLACES, data=NO_TENSOR)


@frozen
class MediaInfo:
    """An engine's form of images and videos, and their tokens in a prompt."""

    form: MediaForm
    width: int  # elements of an embedding
    dtype: Dtype  # the elements' type
    merge: int  # patches of the grid in each direction for one token
    image_token: int | None = None  # the placeholder; None: the model takes no images
    video_token: int | None = None
    start_token: int | None = None  # the token before the placeholders of each item; None: any token

    def placeholder(self, modality: Modality) -> int | None:
        """Return the placeholder's token id for items of a modality, None if the model takes none."""
        return self.image_token if modality is Modality.IMAGE else self.video_token


@frozen
class PrepareMedia(Message):
    """Fetch and decode images and videos; answered by one `MediaPrepared`.

    Prepared items are kept until their asker leaves: the call is the lease of their memory. Work is fair between
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

    The waiting request of the highest `priority` gets the next slot. Queues are fair between `owner`s.
    """

    id: str
    item: MediaItem
    priority: int = 0
    trace: Trace | None = None
    owner: str = ""
    alone: bool = False  # in a batch of its own, since an encoder was lost with its last batch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The pixels."""
        return (self.item.data,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Encode:
        """Return the request with other pixels."""
        (data,) = _exactly(1, tensors)
        return evolve(self, item=evolve(self.item, data=data))

    def check_tensors(self) -> None:
        """Raise `PeerViolation` for a contradictory item."""
        check_item(self.item)


@frozen
class Encoded(Message):
    """The item of an `Encode` with its embeddings; `cached` if they were computed before."""

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
        """Raise `PeerViolation` for a contradictory item, or for one without embeddings."""
        if self.item.form is not MediaForm.EMBEDDINGS:
            raise PeerViolation(f"an item was encoded to {self.item.form}")
        check_item(self.item)


def check_item(item: MediaItem) -> None:
    """Raise `PeerViolation` for an item with impossible numbers or a tensor of another form.

    The limits of one engine are checked later, before it gets the item (`actors/engines/media_check.py`).
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
    """Compute the embeddings of several items, in the process of an encoder; the result is one `EmbeddingBatch`.

    A node sends it only to its own engine's process. An engine computes one batch at a time.
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
class EmbeddingOutcome:
    """The outcome of one item of a batch: its embeddings, or the code and the sentence of its own error."""

    data: Tensor = NO_TENSOR
    code: str = ""  # a `RequestError`'s; empty: the embeddings are there
    detail: str = ""


@frozen
class EmbeddingBatch(Message):
    """The outcomes of the items of a batch, in their order: a wrong item fails alone."""

    outcomes: tuple[EmbeddingOutcome, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The embeddings of each item, without elements for a failed one."""
        return tuple(outcome.data for outcome in self.outcomes)

    def with_tensors(self, tensors: Sequence[Tensor]) -> EmbeddingBatch:
        """Return the outcomes with other embeddings."""
        pairs = zip(self.outcomes, _exactly(len(self.outcomes), tensors), strict=True)
        return EmbeddingBatch(tuple(evolve(outcome, data=data) for outcome, data in pairs))


def with_data(items: Iterable[MediaItem], tensors: Sequence[Tensor]) -> tuple[MediaItem, ...]:
    """Return the items with one tensor each."""
    items = tuple(items)
    return tuple(evolve(item, data=data) for item, data in zip(items, _exactly(len(items), tensors), strict=True))


def grid_tokens(grid: tuple[int, int, int], merge: int) -> int:
    """Return the tokens of a grid of patches, `merge` x `merge` patches each; 0 for an impossible grid."""
    time, height, width = grid
    if min(grid) < 1 or height % merge or width % merge:
        return 0
    return time * (height // merge) * (width // merge)


def expected_shape(item: MediaItem, info: MediaInfo) -> tuple[int, ...] | None:
    """Return the required shape of an item's tensor for an engine; None where pixels may have any size."""
    match item.form:
        case MediaForm.EMBEDDINGS:
            return item.tokens, info.width
        case MediaForm.PLACES:
            return (0,)
        case MediaForm.PIXELS:
            return None


def padded_tokens(tokens: TokenIds, items: Sequence[MediaItem], info: MediaInfo | None) -> TokenIds:
    """Return a prompt's token ids, with ids derived from the digests of its items in place of placeholders.

    Prefix caches are keyed by tokens, so different images behind the same text must differ in them. The derived ids are
    from `PADS_MIN` on: no model has such a token.
    """
    if info is None or not items:
        return tokens
    padded = array("I", tokens.packed)
    for modality in Modality:
        placeholder = info.placeholder(modality)
        places = (place for place, token in enumerate(tokens) if token == placeholder)
        of_modality = ((_digest_bits(item), item.tokens) for item in items if item.modality is modality)
        pads = (PADS_MIN | (bits ^ row) % PADS_MIN for bits, rows in of_modality for row in range(rows))
        for place, pad in zip(places, pads, strict=False):
            padded[place] = pad
    return TokenIds(padded.tobytes())


def _digest_bits(item: MediaItem) -> int:
    """Return the first 32 bits of the digest of an item."""
    return int(item.digest[:8] or "0", 16)


def _exactly(count: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(tensors) != count:
        raise PeerViolation(f"{len(tensors)} tensors for {count} items")
    return tensors


KINDS = (
    Kind(32, Encode, result=Encoded),
    Kind(33, Encoded),
    Kind(34, EncodeBatch, result=EmbeddingBatch),
    Kind(35, EmbeddingBatch),
)
