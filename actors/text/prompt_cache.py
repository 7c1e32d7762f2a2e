"""The prompt cache: token ids and block hashes of the beginnings that prompts have in common, kept in segments.

Each turn of an agent has the text of the turn before, and a little more. A text is cut behind a boundary token
(`actors/text/boundaries.py`), so that its segments are tokenised apart. A segment is stored under a digest of all text
up to its end. Prompts with a beginning in common share its segments, and only the rest is tokenised and hashed.
The ids and hashes are those of the whole text for every state of the cache: what cannot be cut is encoded whole.

State: one ordered dictionary of segments, least recently used first, and the order of the keys of each owner. Each use
moves a text's segments from its end to its beginning. So every stored segment has its predecessors stored, and what is
evicted is the end of some text. Keys are rooted in the owner: no owner learns by timing what another one has sent.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from itertools import pairwise
from typing import TypeAlias

from attrs import Factory, define, evolve, frozen

from actors.kit.offload import give_turn
from actors.text.first_parts import FIRST_CHARACTERS_A_TOKEN, SEAM_TOKENS, TooManyTokens, first_parts
from protocol.block_hashes import block_hashes_after, root_digest
from protocol.messages.generation import PromptBlocks
from protocol.token_ids import ID_BYTES, TokenIds

log = logging.getLogger(__name__)

EncodeText: TypeAlias = Callable[[str], TokenIds]
"""Returns the ids of a text, without the tokens that a tokenizer puts around one."""

CUT_CHARACTERS_MIN = 256
"""The least length of a segment: it bounds the cost of a text of boundaries alone."""

TURN_CHARACTERS = 2**17
"""The characters behind which other work may have the thread. A turn of a conversation is shorter, and keeps it."""

PART_CHARACTERS = 2**19
"""The most characters that are encoded at once, about 0.2 s, but for a single longer segment.

Two calls for halves cost some 10 % more than one call for the whole."""

# The memory of a segment and of an owner without their ids and hashes, measured with CPython 3.11.
SEGMENT_BYTES = 410
BLOCKS_BYTES = 220  # for each page size
OWNER_BYTES = 470


@frozen
class Boundary:
    """The token behind which texts are cut: its content and its id."""

    text: str
    token: int


@frozen
class Hashed:
    """The hashes of the blocks that end in a segment, and the state behind them."""

    digest: bytes  # of the last full block
    rest: bytes = b""  # the packed ids behind it, fewer than a block
    hashes: bytes = b""  # eight for each block

    def after(self, packed: bytes, page_size: int) -> Hashed:
        """Return the same for the ids that follow."""
        packed = self.rest + packed
        hashes, digest = block_hashes_after(self.digest, TokenIds(packed), page_size)
        return Hashed(digest, packed[len(hashes) * page_size * ID_BYTES :], hashes.tobytes())


@frozen(eq=False)
class Segment:
    """The ids of a part of a text, up to the end of a boundary."""

    owner: str
    packed: bytes
    tokens: int  # the number of ids from the beginning of the text to the segment's end
    hashed: tuple[Hashed, ...]  # one for each page size

    @property
    def size(self) -> int:
        """The bytes of memory that it takes in a cache."""
        blocks = sum([BLOCKS_BYTES + len(each.rest) + len(each.hashes) for each in self.hashed])
        return SEGMENT_BYTES + len(self.packed) + blocks


@frozen
class Found:
    """A text, its cuts, and the segments that the cache had of it: it is complete without the cache."""

    text: str
    boundary: Boundary
    owner: str
    namespace: str | None
    page_sizes: tuple[int, ...]
    ends: tuple[int, ...] = ()  # of all segments; behind the last one is the open end
    keys: tuple[bytes, ...] = ()
    segments: tuple[Segment, ...] = ()  # the first ones

    @property
    def reused_tokens(self) -> int:
        """The number of ids that need not be encoded."""
        return self.segments[-1].tokens if self.segments else 0

    @property
    def new_characters(self) -> int:
        """The number of characters to encode."""
        return len(self.text) - self.start

    @property
    def start(self) -> int:
        """The number of characters with stored ids."""
        return self.ends[len(self.segments) - 1] if self.segments else 0

    @property
    def hashed(self) -> tuple[Hashed, ...]:
        """The states behind the stored segments, one for each page size."""
        if self.segments:
            return self.segments[-1].hashed
        return (Hashed(root_digest(self.namespace)),) * len(self.page_sizes)

    def whole(self) -> Found:
        """Return the text without cuts."""
        return evolve(self, ends=(), keys=(), segments=())


@frozen
class EncodedPrompt:
    """The ids of a text, with the hashes of its blocks for each page size; `reused` of the ids were stored."""

    tokens: TokenIds
    blocks: tuple[PromptBlocks, ...] = ()
    reused: int = 0


@frozen
class PromptCacheStatistics:
    """The size of a cache, and what it has done so far."""

    size_bytes: int
    segments: int
    reused_tokens: int
    encoded_tokens: int
    evicted: int  # segments
    mismatches: int  # texts whose ids were not those of their parts


class Mismatch(Exception):
    """The ids of a part do not have the boundaries of its text."""


@define
class _Owned:
    """The keys of one owner's segments, least recently used first, and their size."""

    size: int = OWNER_BYTES
    keys: OrderedDict[bytes, None] = Factory(OrderedDict)


class PromptCache:
    """The segments of one model's prompts, `bytes_max` at most; `lock` guards it between threads.

    The lock is held for look-ups and puts alone. Two equal texts at once are both encoded, and stored once. A cache
    without room, and one that has been wrong, is disabled: every text is encoded whole.
    """

    def __init__(self, bytes_max: int, lock: AbstractContextManager[object]) -> None:
        self._bytes_max = bytes_max
        self._lock = lock
        self._disabled = not bytes_max
        self._size = self._reused = self._encoded = self._evicted = self._mismatches = 0
        self._segments = OrderedDict[bytes, Segment]()
        self._owners = dict[str, _Owned]()

    def find(
        self, text: str, boundary: Boundary, owner: str, namespace: str | None, page_sizes: Sequence[int]
    ) -> Found:
        """Return the cuts of a text, and its segments up to the first one that is not stored.

        `namespace` is the salt of the text's block hashes.
        """
        found = Found(text, boundary, owner, namespace, tuple(page_sizes))
        if self._disabled or len(text) < CUT_CHARACTERS_MIN:
            return found
        ends = tuple(_cuts(text, boundary.text))
        keys = tuple(_keys(text, ends, root(owner, namespace, page_sizes)))
        segments = list[Segment]()
        with self._lock:
            for key in keys:
                if (segment := self._segments.get(key)) is None:
                    break
                segments.append(segment)
        return evolve(found, ends=ends, keys=keys, segments=tuple(segments))

    def complete(self, found: Found, encode: EncodeText, tokens_max: int) -> EncodedPrompt:
        """Encode and hash what is new, and store it; raises `TooManyTokens` once it is certain, and stores nothing.

        A text with slightly more tokens may be returned, and is not stored.
        """
        if self._disabled:
            found = found.whole()
        try:
            segments, tail = _completed(found, encode, tokens_max)
        except Mismatch:
            self._disable(found.boundary)
            found = found.whole()
            segments, tail = _completed(found, encode, tokens_max)
        reused = found.reused_tokens
        with self._lock:
            self._reused += reused
            self._encoded += tail.tokens - reused
            if segments and tail.tokens <= tokens_max and not self._disabled:
                self._put(found, segments)
        return _joined(found, [*segments, tail], reused)

    def verify(self, text: str, boundary: Boundary, tokens: TokenIds, encode: EncodeText) -> None:
        """Disable the cache unless these are the ids of the whole text, which is cut behind the boundary."""
        if encode(text) != tokens:
            self._disable(boundary)

    def _disable(self, boundary: Boundary) -> None:
        log.error(
            "a text that was cut has other token ids than the whole: texts are encoded whole from now on",
            extra={"boundary": boundary.text},
        )
        with self._lock:
            self._mismatches += 1
        self._disabled = True
        self.clear()

    def clear(self) -> None:
        """Drop all segments."""
        with self._lock:
            self._segments.clear()
            self._owners.clear()
            self._size = 0

    def statistics(self) -> PromptCacheStatistics:
        """Return the size of the cache, and what it has done."""
        with self._lock:
            return PromptCacheStatistics(
                self._size, len(self._segments), self._reused, self._encoded, self._evicted, self._mismatches
            )

    def _put(self, found: Found, segments: Sequence[Segment]) -> None:
        """Store a text's segments, from the last one to the first, which so is the most recently used."""
        owner = found.owner
        if (owned := self._owners.get(owner)) is None:
            owned = self._owners[owner] = _Owned()
            self._size += OWNER_BYTES
        for key, segment in zip(reversed(found.keys), reversed(segments), strict=True):
            if key in owned.keys:
                self._segments.move_to_end(key)
                owned.keys.move_to_end(key)
            else:
                self._segments[key], owned.keys[key] = segment, None
                owned.size += segment.size
                self._size += segment.size
        while self._size > self._bytes_max:
            # An owner with most of the cache makes room out of its own segments, so that the others keep theirs.
            own = owner in self._owners and owned.size > self._bytes_max // 2
            self._evict(next(iter(owned.keys if own else self._segments)))

    def _evict(self, key: bytes) -> None:
        segment = self._segments.pop(key)
        owned = self._owners[segment.owner]
        del owned.keys[key]
        owned.size -= segment.size
        self._size -= segment.size
        self._evicted += 1
        if not owned.keys:
            del self._owners[segment.owner]
            self._size -= OWNER_BYTES


def root(owner: str, namespace: str | None, page_sizes: Sequence[int]) -> bytes:
    """Return the digest before the first segment: segments are shared only where all of these are equal."""
    return sha256(repr((owner, namespace, tuple(page_sizes))).encode()).digest()


def _cuts(text: str, boundary: str) -> Iterator[int]:
    """Yield the ends of the segments, greedily from the start: texts with a beginning in common share its cuts."""
    end = 0
    while (start := text.find(boundary, max(end, end + CUT_CHARACTERS_MIN - len(boundary)))) >= 0:
        end = start + len(boundary)
        yield end


def _keys(text: str, ends: Sequence[int], digest: bytes) -> Iterator[bytes]:
    start = 0
    for end in ends:
        # Encoding refuses a lone surrogate, as it does in the whole text.
        digest = sha256(digest + text[start:end].encode("utf-8", "surrogatepass")).digest()
        yield digest
        start = end


def _completed(found: Found, encode: EncodeText, tokens_max: int) -> tuple[list[Segment], Segment]:
    """Return all segments of a text, and its open end."""
    segments, hashed, tokens = list(found.segments), found.hashed, found.reused_tokens
    for packed in _encoded(found, encode, tokens_max):
        tokens += len(packed) // ID_BYTES
        hashed = tuple([before.after(packed, size) for before, size in zip(hashed, found.page_sizes, strict=True)])
        segments.append(Segment(found.owner, packed, tokens, hashed))
    return segments[:-1], segments[-1]


def _encoded(found: Found, encode: EncodeText, tokens_max: int) -> Iterator[bytes]:
    """Yield the packed ids of each new segment, and of the open end."""
    text, sentinel = found.text, found.boundary.text
    ends, start = [*found.ends[len(found.segments) :], len(text)], found.start
    tokens, first, apart, turn_start = found.reused_tokens, 0, 0, start  # segments before `apart` are encoded singly
    while first < len(ends):
        if start - turn_start >= TURN_CHARACTERS:
            give_turn()
            turn_start = start
        room = tokens_max + SEAM_TOKENS - tokens
        if room < 0:
            raise TooManyTokens(f"more than {tokens_max}")
        characters = min(PART_CHARACTERS, FIRST_CHARACTERS_A_TOKEN * max(room, SEAM_TOKENS))
        last = first + 1
        while first >= apart and last < len(ends) and ends[last] - start <= characters:
            last += 1
        part = text[start : ends[last - 1]]
        for length in first_parts(len(part), room):
            if len(encode(part[:length])) > room:
                raise TooManyTokens(f"more than {tokens_max}")
        ids = encode(sentinel + part if start else part).packed
        pieces = _split(found, ids, [start, *ends[first:last]])
        if pieces is None:
            apart = last  # no segment is encoded more than twice
            continue
        yield from pieces
        tokens += sum(map(len, pieces)) // ID_BYTES
        start, first = ends[last - 1], last


def _split(found: Found, ids: bytes, cuts: Sequence[int]) -> list[bytes] | None:
    """Return the packed ids of each part between the cuts, None if they cannot be told apart.

    Every occurrence of the boundary in the text gives its id. A model may give that id for other text, too: where ids
    are more than occurrences, the parts must be encoded one by one. Raises `Mismatch` if they are fewer.
    """
    text, boundary = found.text, found.boundary
    packed = boundary.token.to_bytes(ID_BYTES, "little")
    begin = ID_BYTES if cuts[0] else 0  # behind the boundary that was encoded before the text
    if begin and not ids.startswith(packed):
        raise Mismatch
    if len(cuts) == 2:
        if text.endswith(boundary.text, *cuts) and not ids[begin:].endswith(packed):
            raise Mismatch
        return [ids[begin:]]
    places = list(_places(ids, packed, begin))
    counts = [text.count(boundary.text, start, end) for start, end in pairwise(cuts)]
    if len(places) != sum(counts):
        if len(places) < sum(counts):
            raise Mismatch
        return None
    pieces, seen = list[bytes](), 0
    for number in counts[:-1]:
        seen += number
        end = places[seen - 1] + ID_BYTES
        pieces.append(ids[begin:end])
        begin = end
    return [*pieces, ids[begin:]]


def _places(ids: bytes, packed: bytes, start: int) -> Iterator[int]:
    """Yield where an id is among packed ids."""
    while (start := ids.find(packed, start)) >= 0:
        if start % ID_BYTES:
            start += 1  # it lies across two ids
        else:
            yield start
            start += ID_BYTES


def _joined(found: Found, segments: Sequence[Segment], reused: int) -> EncodedPrompt:
    blocks = list[PromptBlocks]()
    for index, page_size in enumerate(found.page_sizes):
        hashes = array("q", b"".join([segment.hashed[index].hashes for segment in segments]))
        blocks.append(PromptBlocks(page_size, hashes, segments[-1].hashed[index].digest))
    return EncodedPrompt(TokenIds(b"".join([segment.packed for segment in segments])), tuple(blocks), reused)
