"""Prompts that begin alike: one request computes the beginning, and the others wait until it is in the prefix cache.

An engine computes as many prompts in one step as fit. So each request of a burst would compute their common beginning
if it is in no cache yet. Here a request waits, in its slot and with its KV memory, while another computes much of the
same prefix. It waits for the first token or the end of the other request, and then finds the prefix in the cache.
Routers count on it: a prefix that a worker is about to compute counts as cached there.

Waiting requests hold up no requests behind them. The router reports the cached part of a prompt (`cached_tokens`), so
cached prompts wait for nothing. Each prompt is hashed once, in parts, so that two long prompts are compared in
microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable

import trio
from attrs import define, field, frozen

from protocol.messages.generation import Generate
from protocol.token_ids import ID_BYTES, TokenIds

SHARED_MIN = 32
"""The fewest tokens in common for which a request waits: fewer cost less than a step."""

SHARED_ENOUGH = 256
"""The tokens in common for which a request always waits; below them they must be half of what it would compute."""

PART_BYTES = 256 * ID_BYTES


@frozen(eq=False)
class HashedPrompt:
    """The tokens of a prompt, and a hash of all up to the end of each part."""

    packed: bytes
    hashes: list[int]

    @classmethod
    def of(cls, tokens: TokenIds) -> HashedPrompt:
        """Return a prompt that can be compared with others."""
        packed, hashes = tokens.packed, [0]
        for start in range(0, len(packed) - PART_BYTES + 1, PART_BYTES):
            hashes.append(hash((hashes[-1], packed[start : start + PART_BYTES])))
        return cls(packed, hashes)

    def begins_like(self, other: HashedPrompt, tokens: int) -> bool:
        """Whether this prompt begins with the first `tokens` tokens of another prompt, which must have as many."""
        end = tokens * ID_BYTES
        part, rest = end // PART_BYTES, slice(end // PART_BYTES * PART_BYTES, end)
        is_long_enough = len(self.packed) >= end
        return is_long_enough and self.hashes[part] == other.hashes[part] and self.packed[rest] == other.packed[rest]

    def common(self, other: HashedPrompt) -> int:
        """Return the length of the common prefix of two prompts, in tokens."""
        parts = range(1, min(len(self.hashes), len(other.hashes)))
        same = bisect_left(parts, True, key=lambda part: self.hashes[part] != other.hashes[part])
        rest = slice(same * PART_BYTES, (same + 1) * PART_BYTES)
        one, two = (memoryview(prompt.packed[rest]).cast("I") for prompt in (self, other))
        size = min(len(one), len(two))
        return rest.start // ID_BYTES + next((n for n in range(size) if one[n] != two[n]), size)


@define(eq=False)
class _Computing:
    """A prompt that has no first token yet."""

    prompt: HashedPrompt
    cached: int  # its tokens in the cache when the engine got it
    has_begun: bool = False  # if so, its prompt is in the cache
    over: trio.Event = field(factory=trio.Event)  # set once it has begun or ended


@define(eq=False)
class SharedPrefixes:
    """The prompts that one rank of an engine is computing, grouped by cache salt, media and first page of tokens."""

    page_size: int
    _groups: dict[Hashable, dict[str, _Computing]] = field(factory=dict)

    def __len__(self) -> int:
        """Return the number of prompts that are being computed."""
        return sum(map(len, self._groups.values()))

    async def wait(self, request: Generate, within_s: float) -> None:
        """Wait while others compute much of what a request would compute; from then on it counts as one of them.

        It waits for `within_s` at most. Call `discard` when the request has begun or ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        key, prompt = self._key(request), HashedPrompt.of(request.tokens)
        length, cached = len(request.tokens), max(0, request.cached_tokens)
        with trio.move_on_after(within_s):
            await trio.lowlevel.checkpoint_if_cancelled()
            # What an engine computes log probabilities of, it finds in no cache.
            while not request.prompt_logprobs and (end := self._shared_end(length, cached)) < length:
                others = self._groups.get(key, {}).values()
                other = next((one for one in others if one.prompt.begins_like(prompt, end)), None)
                if other is None:
                    break
                # The router of this request may have chosen before the other's cached tokens were reported.
                in_cache = other.cached
                if in_cache < end:
                    await other.over.wait()
                    in_cache = length if other.has_begun else cached
                cached = min(in_cache, other.prompt.common(prompt))
        self._groups.setdefault(key, {})[request.id] = _Computing(prompt, cached)

    def discard(self, request: Generate, *, has_begun: bool) -> None:
        """Count a request no more, and wake the requests that wait for it; idempotent."""
        key = self._key(request)
        group = self._groups.get(key, {})
        if (computing := group.pop(request.id, None)) is not None:
            computing.has_begun = has_begun
            computing.over.set()
            if not group:
                del self._groups[key]

    def _key(self, request: Generate) -> Hashable:
        media = tuple(item.digest for item in request.media)
        return request.cache_namespace, media, request.tokens[: self.page_size]

    def _shared_end(self, length: int, cached: int) -> int:
        """Return the least common prefix for which a prompt waits for another; the last token is always computed."""
        shared = max(SHARED_MIN, self.page_size, min((length - cached) // 2, SHARED_ENOUGH))
        return -(-(cached + shared) // self.page_size) * self.page_size
