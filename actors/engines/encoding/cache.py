"""The embeddings that an encoder has made, kept by their digests up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from attrs import define, field

from protocol.messages.media import MediaItem


@define(eq=False)
class EmbeddingCache:
    """Items with their embeddings; the least recently used go first when their bytes exceed `bytes_max`.

    A digest names content and processing, so nothing in here can become wrong while the model stays the same.
    """

    bytes_max: int
    kept_bytes: int = 0
    evictions: int = 0
    _items: OrderedDict[str, MediaItem] = field(factory=OrderedDict)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def get(self, digest: str) -> MediaItem | None:
        """Return the item of a digest, which is used most recently from now on; None if it is not here."""
        if (item := self._items.get(digest)) is not None:
            self._items.move_to_end(digest)
        return item

    def put(self, item: MediaItem) -> None:
        """Keep an item, unless it alone is larger than the cache; it must own the bytes of its embeddings."""
        size = len(item.data.data)
        if size > self.bytes_max:
            return
        self._remove(item.digest)
        while self._items and self.kept_bytes + size > self.bytes_max:
            self._remove(next(iter(self._items)))
            self.evictions += 1
        self._items[item.digest] = item
        self.kept_bytes += size

    def clear(self) -> None:
        """Drop everything."""
        self._items.clear()
        self.kept_bytes = 0

    def _remove(self, digest: str) -> None:
        if (item := self._items.pop(digest, None)) is not None:
            self.kept_bytes -= len(item.data.data)
