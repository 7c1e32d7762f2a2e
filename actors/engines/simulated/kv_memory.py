"""Paged KV memory with a prefix cache: only counts and digests, as nothing is stored in the pages.

A full page is identified by a digest of its tokens and of all before them, so equal digests mean equal prefixes, and
requests with the same prefix share its pages. The digests are SGLang's (`protocol/block_hashes.py`), so a simulated
engine's events look like a real one's. An unreferenced page stays until its memory is needed; the least recently used
page is evicted first, and the last page of a request before its others. Pages for the prompt and for the answer are
taken before a request runs; only a very long answer takes more later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from attrs import Factory, define, field

from actors.engines.simulated.cache_events import CacheEvents


@define(eq=False)
class Lease:
    """The pages of one request: the shareable ones, in the order of its tokens, and the count of its own."""

    shared: list[bytes]
    own: int

    @property
    def pages(self) -> int:
        """The number of its pages."""
        return len(self.shared) + self.own


@define(eq=False)
class KvMemory:
    """All pages of one engine; each is free, one request's own, referenced by some, or idle (cached, unreferenced)."""

    pages_max: int
    events: CacheEvents = field(factory=CacheEvents)  # the changes of the cached pages
    _own: int = 0
    _references: dict[bytes, int] = Factory(dict)
    _idle: OrderedDict[bytes, None] = Factory(OrderedDict)  # the least recently used first, found at once

    @property
    def free(self) -> int:
        """The number of empty pages."""
        return self.pages_max - self._own - len(self._references) - len(self._idle)

    @property
    def referenced(self) -> int:
        """The number of referenced shared pages, each counted once."""
        return len(self._references)

    @property
    def idle(self) -> int:
        """The number of pages that are cached and unreferenced."""
        return len(self._idle)

    def cached_prefix(self, digests: Iterable[bytes]) -> int:
        """Return how many pages of a prefix are cached, from its first page on."""
        return sum(1 for _ in takewhile(self._is_cached, digests))

    def take(self, digests: Sequence[bytes], pages: int) -> Lease | None:
        """Lease so many pages, a cached prefix's pages shared; None while there are too few."""
        cached = self.cached_prefix(digests)
        cached_digests = list(digests[:cached])
        assert cached <= pages, "a prefix is part of the whole"
        missing = pages - cached
        evictable = len(self._idle) - sum(digest in self._idle for digest in cached_digests)
        if missing > self.free + evictable:
            return None
        for digest in cached_digests:
            self._reference(digest)
        self._make_room(missing)
        self._own += missing
        return Lease(cached_digests, missing)

    def extend(self, lease: Lease) -> bool:
        """Add a page to a lease, if need be by an eviction as in `take`; return False if there is none."""
        if not self.free and not self._idle:
            return False
        self._make_room(1)
        self._own += 1
        lease.own += 1
        return True

    def share(self, lease: Lease, digest: bytes) -> bool:
        """Let the next page of a lease be the cached one, and free its own; return False if there is none."""
        if not self._is_cached(digest):
            return False
        self.publish(lease, digest)
        return True

    def publish(self, lease: Lease, digest: bytes) -> None:
        """Share the next page of a lease, which is full; of two equal pages one is freed."""
        assert lease.own > 0, "only a page that is there can be shared"
        lease.own -= 1
        self._own -= 1
        if not self._is_cached(digest):
            self.events.stored(digest, lease.shared[-1] if lease.shared else None)
        self._reference(digest)
        lease.shared.append(digest)

    def release(self, lease: Lease) -> None:
        """Return all pages of a lease; the shared ones stay cached."""
        self._own -= lease.own
        lease.own = 0
        # The last page first: a prefix without its end can be used, an end without its prefix cannot.
        while lease.shared:
            digest = lease.shared.pop()
            self._references[digest] -= 1
            if not self._references[digest]:
                del self._references[digest]
                self._idle[digest] = None

    def flush(self) -> None:
        """Drop every page that is not referenced."""
        if self._references:
            for digest in self._idle:
                self.events.removed(digest)
        else:
            self.events.cleared()
        self._idle.clear()

    def _is_cached(self, digest: bytes) -> bool:
        return digest in self._references or digest in self._idle

    def _make_room(self, pages: int) -> None:
        """Evict until so many pages are free."""
        for _ in range(pages - self.free):
            digest, _ = self._idle.popitem(last=False)
            self.events.removed(digest)

    def _reference(self, digest: bytes) -> None:
        self._idle.pop(digest, None)
        self._references[digest] = self._references.get(digest, 0) + 1
