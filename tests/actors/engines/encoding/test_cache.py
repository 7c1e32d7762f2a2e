"""Embeddings are kept by their digests, the most recently used ones, and never more bytes than stated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engines.encoding.cache import EmbeddingCache
from protocol.messages.media import MediaForm, MediaItem, Modality
from protocol.tensors import Dtype, Tensor


def kept(name: str, size: int = 1) -> MediaItem:
    data = Tensor(Dtype.UINT8, (size,), memoryview(bytes(size)))
    return MediaItem(Modality.IMAGE, name, (1, 2, 2), 1, MediaForm.EMBEDDINGS, data)


def test_the_least_recently_used_go_first() -> None:
    cache = EmbeddingCache(3)
    for name in "abc":
        cache.put(kept(name))
    assert cache.get("a") is not None
    cache.put(kept("d", 2))
    assert [name for name in "abcd" if cache.get(name)] == ["a", "d"]
    assert (len(cache), cache.kept_bytes, cache.evictions) == (2, 3, 2)


def test_a_cache_can_be_emptied() -> None:
    cache = EmbeddingCache(3)
    cache.put(kept("a"))
    cache.clear()
    assert (cache.get("a"), len(cache), cache.kept_bytes) == (None, 0, 0)
    cache.put(kept("a", 3))
    assert cache.kept_bytes == 3


@given(st.integers(0, 9), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12))))
def test_it_never_holds_more_than_its_bytes(bytes_max: int, puts: list[tuple[str, int]]) -> None:
    cache = EmbeddingCache(bytes_max)
    for name, size in puts:
        cache.put(kept(name, size))
        found = [item for each in "abcdef" if (item := cache.get(each)) is not None]
        assert cache.kept_bytes == sum(len(item.data.data) for item in found) <= bytes_max
        assert len(cache) == len(found)
