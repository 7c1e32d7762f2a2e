"""The KV memory of one rank: blocks of running requests, the prefix cache, and the events of its changes."""

import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from attrs import define, field

PRIORITY = 35


@define
class Cached:
    """A block in the cache, with all tokens up to its end."""

    prefix: tuple[int, ...]
    salt: str | None
    lost: bool = False  # whether its contents are gone


def block_hash(parent: int | None, tokens: Sequence[int], salt: str | None, lora: int | None = None) -> int:
    """Return the hash of a block, which no other package computes; `lora` is the number of its adapter."""
    packed = struct.pack(f"<qq{len(tokens)}I", (parent or 0) % 2**63, -1 if lora is None else lora, *tokens)
    return int.from_bytes(sha256(packed + (salt or "").encode()).digest()[:8], "little")


@define
class Cache:
    blocks_max: int
    block_tokens: int
    windows: tuple[int, ...]  # of the attention's layers, the largest first
    rank: int | None  # None: the engine has one rank
    events_max: int
    reuses: bool = True
    used: int = 0  # blocks of requests
    events: deque[dict[str, Any]] = field(init=False)
    missed: int = 0
    _number: int = 0
    cached: OrderedDict[int, Cached] = field(init=False, factory=OrderedDict)  # a block behind those that follow it

    def __attrs_post_init__(self) -> None:
        self.events = deque()
        for window in self.windows:
            self._emit({"type": "created", "num_blocks_per_cache_level": [self.blocks_max, 0]}, window)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-tokens // self.block_tokens)

    def found(self, prompt: Sequence[int], salt: str | None, lora: int | None = None) -> int:
        """Return how many tokens of a prompt are in the cache; the last one always is computed."""
        return len(self._found(prompt, salt, lora)) * self.block_tokens

    def reads_lost(self, prompt: Sequence[int], salt: str | None, lora: int | None = None) -> bool:
        """Whether a block of a prompt is in the cache without its contents."""
        return any(block.lost for block in self._found(prompt, salt, lora))

    def _found(self, prompt: Sequence[int], salt: str | None, lora: int | None) -> list[Cached]:
        parent, found = None, list[Cached]()
        for start in range(0, len(prompt) - self.block_tokens if self.reuses else 0, self.block_tokens):
            parent = block_hash(parent, prompt[start : start + self.block_tokens], salt, lora)
            if parent not in self.cached:
                break
            found.append(self.cached[parent])
        return found

    def store(self, tokens: Sequence[int], salt: str | None, lora: int | None = None, *, ended: bool = False) -> None:
        """Keep the full blocks of tokens; at the end of a request the partial one is reported as well."""
        if not self.reuses:
            return
        parent: int | None = None
        before, new, chain = parent, list[dict[str, Any]](), list[int]()
        for start in range(0, len(tokens), self.block_tokens):
            block = tuple(tokens[start : start + self.block_tokens])
            if len(block) < self.block_tokens and not ended:
                break
            own = block_hash(parent, block, salt, lora)
            if own not in self.cached:
                before = before if new else parent
                self.cached[own] = Cached(tuple(tokens[: start + len(block)]), salt)
                new.append(_stored(own, block, salt))
            chain.append(own)
            parent = own
        for own in reversed(chain):  # so a block is dropped only after those that follow it
            self.cached.move_to_end(own)
        if new:
            for window in self.windows:
                self._emit({"type": "stored", "parent_hash": before, "blocks": new}, window)
        self.make_room(0)

    def make_room(self, blocks: int) -> bool:
        """Drop cached blocks until so many more can be used; whether there is room for them at all."""
        if self.used + blocks > self.blocks_max:
            return False
        removed = []
        while self.cached and self.used + blocks + len(self.cached) > self.blocks_max:
            removed.append(self.cached.popitem(last=False)[0])
        if removed:
            for window in self.windows:
                self._emit({"type": "removed", "block_hashes": removed}, window)
        return True

    def lose(self) -> None:
        """Lose the contents of all blocks, which stay in the cache, as released memory does."""
        for block in self.cached.values():
            block.lost = True

    def _emit(self, data: dict[str, Any], window: int) -> None:
        event = {"event_id": self._number, "data": data, "window_size": window}
        if self.rank is not None:
            event["attention_dp_rank"] = self.rank
        self._number += 1
        if not self.events_max:
            return
        if len(self.events) == self.events_max:
            self.events.popleft()
            self.missed += 1
        self.events.append(event)


def _stored(own: int, tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
    ids = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens]
    return {
        "type": "stored_block",
        "block_hash": own,
        "tokens": ids,
        "cache_level": 0,
        "priority": PRIORITY,
        "mm_keys": [],
        "cache_salt": salt,
    }
